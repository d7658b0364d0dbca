"""``bench sandbox``, small: on the local runtime, and one start by hand where containers work."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.bench import sandbox_cycles, sandbox_starts
from prorl_hpc.bench.sandbox_bed import open_runtime
from prorl_hpc.bench.start_by_hand import ByHand
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import RunError, SandboxError
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import SandboxSpec


def quiet(words: str) -> None:
    pass


async def test_many_at_once_against_one_by_one() -> None:
    failures, total = await sandbox_starts.many(3, 1, quiet, "local")
    assert (failures.value, failures.against, failures.holds) == (0, "6 starts", True)
    assert total.goal == "<= 0.8" and total.value


async def test_a_start_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    async with open_runtime("local", SandboxConfig()) as runtime:
        start = runtime.start

        async def fails_once(spec: SandboxSpec) -> object:
            if not failures:
                raise SandboxError("no space")
            return await start(spec)

        monkeypatch.setattr(runtime, "start", fails_once)
        await sandbox_starts._start_all(runtime, 2, failures, at_once=False)
    assert failures == ["no space"]


async def test_the_warm_pool_is_judged_in_milliseconds() -> None:
    figures = await sandbox_starts.warm(1, quiet, "local")
    assert [(figure.unit, figure.goal) for figure in figures] == [("ms", "< 5"), ("ms", "")]
    assert "not judged" in figures[1].detail


@pytest.mark.apptainer
async def test_ready_against_a_start_by_hand(tmp_path: Path) -> None:
    try:
        figures = await sandbox_starts.ready(1, quiet)
    except SandboxError as error:
        pytest.skip(f"apptainer does not work on this machine: {error}")
    assert [figure.goal for figure in figures] == ["<= 1.3", "", ""]


async def test_a_start_by_hand_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "apptainer"
    binary.write_text("#!/bin/sh\necho no user namespaces here >&2; exit 1\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RunError, match="no user namespaces here"):
        await ByHand(tmp_path / "by_hand").server()


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sandbox", "--part", "redy"]) == 2
    assert "Did you mean ready?" in capsys.readouterr().err


async def test_cycles_leave_nothing_and_it_is_seen_where_something_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    [figure] = await sandbox_cycles.cycles(6, quiet, "local")
    assert (figure.value, figure.goal, figure.holds) == (0, "= 0", True)
    cycle, told = sandbox_cycles._cycle, []

    async def untidy(runtime: AttachedRuntime, number: int) -> None:
        await cycle(runtime, number)
        assert runtime._holding is not None
        (runtime._holding.path / f"left-{number}").touch()

    monkeypatch.setattr(sandbox_cycles, "_cycle", untidy)
    [figure] = await sandbox_cycles.cycles(3, told.append, "local")
    assert (figure.value, figure.holds) == (3, False)
    assert sum("left-" in words for words in told) == 3
