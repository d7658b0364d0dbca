"""``bench tools`` without containers: its arithmetic, its turns, and its programs in a local sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.bench import cells, output_speed, shell_round_trips, tools
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.samples import Samples, Side, in_turns, ratio, told_ratio
from prorl_hpc.bench.sandbox_bed import SandboxBed
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import RunError, SandboxError


def quiet(words: str) -> None:
    pass


def test_median_and_p95_are_times_that_were_measured() -> None:
    samples = Samples([float(number) for number in range(200, 0, -1)])
    assert (samples.median, samples.p95, len(samples)) == (100.0, 190.0, 200)
    assert Samples([3.0]).median == Samples([3.0]).p95 == 3.0
    assert str(Samples([0.001])) == "median 1 ms, p95 1 ms"
    with pytest.raises(RunError, match="nothing was timed"):
        Samples([])


async def test_sides_take_turns_and_each_comes_first() -> None:
    made: list[tuple[str, int]] = []

    def side(name: str) -> Side:
        async def times(count: int) -> list[float]:
            made.append((name, count))
            return [float(len(made))] * count

        return times

    first, second = await in_turns(5, 2, side("a"), side("b"))
    assert made == [("a", 2), ("b", 2), ("b", 2), ("a", 2), ("a", 1), ("b", 1)]
    assert len(first) == len(second) == 5
    assert first.median == 4.0 and second.median == 3.0


def test_a_ratio_is_judged_by_median_and_by_p95() -> None:
    ours, theirs = Samples([0.002] * 95 + [0.5] * 5), Samples([0.001] * 90 + [0.01] * 10)
    median, p95 = ratio("call", ours, theirs, 2.0, "peer")
    assert (median.name, median.value, median.goal, median.holds) == ("call, median", 2.0, "<= 2", True)
    assert p95.value == pytest.approx(0.2) and p95.holds is True
    assert "100 calls: median 2 ms, p95 2 ms" in median.detail and "median 1 ms, p95 10 ms" in median.detail
    assert ratio("call", ours, theirs, 1.9, "peer")[0].holds is False
    (told,) = told_ratio("call", ours, theirs, "peer")
    assert (told.value, told.goal, told.holds) == (2.0, "", None)


def test_the_p95_of_few_calls_decides_nothing() -> None:
    few, enough = Samples([0.001] * 19 + [1.0]), Samples([0.001] * 200)
    for ours, theirs in ((few, enough), (enough, few)):
        median, p95 = ratio("call", ours, theirs, 2.0, "peer")
        assert median.holds is True
        assert (p95.goal, p95.holds) == ("", None)
        assert p95.detail == "not judged: it takes 100 calls, here are 20; the median decides"


async def test_the_shell_against_its_floor() -> None:
    figures = await shell_round_trips.against_floor(2, quiet, "local")
    assert [figure.goal for figure in figures] == ["<= 2.5", "", "", ""] * 2
    assert all(figure.value and figure.value > 0 for figure in figures)


async def test_a_shell_that_answers_wrongly_is_not_timed() -> None:
    async with SandboxBed.open("local") as bed:
        with pytest.raises(RunError, match="`echo hello` gave"):
            await shell_round_trips.round_trips(bed.sandbox, "echo hello", "goodbye", 1)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux on this machine")
async def test_the_shell_against_tmux() -> None:
    figures = await shell_round_trips.against_tmux(1, quiet, "local")
    assert [figure.goal for figure in figures] == ["<= 0.0333", "", "", "", ""]


async def test_output_against_a_bare_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_speed, "_MB", 1)
    figures = await output_speed.measure(1, quiet, "local")
    assert [figure.goal for figure in figures] == ["<= 1.5", "", "<= 1.3"]


async def test_cells_against_jupyter_client_over_tcp() -> None:
    figures = await cells.measure(1, quiet, "local")
    assert [figure.goal for figure in figures] == ["<= 0.8", "", "<= 0.1", ""]


async def test_a_program_that_fails_inside_says_why() -> None:
    async with SandboxBed.open("local") as bed:
        with pytest.raises(RunError, match=r"ModuleNotFoundError.*exit code 1"):
            await bed.inside("swe_rex_session.py", 1, "true", site="/nowhere")


async def test_a_peer_s_packages_are_brought_without_pip(tmp_path: Path) -> None:
    packages = tmp_path / "peer-1.0" / "lib" / "python3.11" / "site-packages"
    for name in ("peer/__init__.py", "pip/__init__.py"):
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_text("VALUE = 1\n")
    async with SandboxBed.open("local") as bed:
        site = await bed.bring_environment(tmp_path / "peer-1.0")
        assert await bed.sandbox.download(f"{site}/peer/__init__.py") == b"VALUE = 1\n"
        with pytest.raises(SandboxError):
            await bed.sandbox.download(f"{site}/pip/__init__.py")


def test_what_could_not_be_measured_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def no_containers(calls: int, say: object) -> list[Figure]:
        raise SandboxError("neither apptainer nor singularity is on PATH\nload the site's module")

    async def holds(calls: int, say: object) -> list[Figure]:
        return [Figure.at_most("calls", calls, 20, "x", "peer")]

    monkeypatch.setattr(tools, "_MEASURES", {"floor": no_containers, "output": holds})
    assert main(["bench", "tools", "--quick", "--part", "floor", "output"]) == 1
    told = capsys.readouterr()
    assert "floor broke: neither apptainer" in told.err
    assert "not taken" in told.out and "neither apptainer" in told.out
    assert main(["bench", "tools", "--quick", "--part", "output"]) == 0


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tools", "--part", "flor"]) == 2
    assert "Did you mean floor?" in capsys.readouterr().err


def test_defaults_are_those_of_a_run() -> None:
    """What is measured is what a rollout gets."""
    assert SandboxConfig().image == "host" and tools.CALLS == 200
