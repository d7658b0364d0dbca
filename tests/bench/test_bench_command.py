"""`prorl-hpc bench`: what it says about itself, and to wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.bench import coordinator, sandbox
from prorl_hpc.bench.figures import Figure
from prorl_hpc.messages.errors import RunError


@pytest.mark.parametrize(
    "words",
    [["bench", "--help"], *(["bench", name, "--help"] for name in ("coordinator", "soak", "tools", "sandbox"))],
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(words) == 0
    except SystemExit as end:
        assert end.code == 0
    assert "usage: prorl-hpc bench" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["cordinator"], "Did you mean coordinator?"),
        (["coordinator", "--part", "latancy"], "Did you mean latency?"),
        (["soak", "rolouts=5"], "Did you mean rollouts?"),
        (["soak", "rollouts=5", "--json", "seed=x"], "seed=x: expected"),
        (["soak", "rollouts=0"], "a whole number, 1 or more"),
        (["soak", "seed=x"], "a whole number, 0 or more"),
    ],
)
def test_wrong_words(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "# no marks\n", "<!-- bench sandbox -->\nno end\n"])
def test_where_the_table_goes_is_looked_at_before_anything_is_measured(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> None:
        pytest.fail("it measured first")

    monkeypatch.setattr(sandbox, "measure", measured)
    page = tmp_path / "notes.md"
    if content is not None:
        page.write_text(content)
    assert main(["bench", "sandbox", "--write", str(page)]) == 2
    told = capsys.readouterr().err
    assert ("there is no file" if content is None else "has no place") in told and "<!-- bench sandbox -->" in told


def test_a_part_that_breaks_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(quick: bool, say: object) -> list[Figure]:
        raise RunError("no disk\nand more")

    monkeypatch.setattr(coordinator.simulator_scale, "measure", breaks)
    monkeypatch.setattr(coordinator.coupled, "measure", lambda quick, say: [Figure.exactly("c", 0, 0, "", "")])
    found = coordinator.measure(["simulator", "coupled"], True, lambda words: None)
    assert [(figure.name, figure.holds) for figure in found] == [("c", True), ("simulator", None)]
    assert found[1].detail == "no disk"
