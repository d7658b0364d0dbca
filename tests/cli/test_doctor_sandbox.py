"""What doctor says of sandboxes; the trial itself is made where Apptainer works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prorl_hpc.cli import doctor_sandbox
from prorl_hpc.cli.doctor_sandbox import Trial, examine_sandboxes
from prorl_hpc.cli.findings import Finding
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.cgroups import Cgroups

GOOD = Trial(
    look="1\nCapEff:\t0000000000000000\nSeccomp:\t2\n",
    said={
        "memory": "[the sandbox used 150 MiB of memory, …]",
        "processes": "… processes that are allowed",
        "disk": "of disk",
    },
)


def graded(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.subject: finding.grade for finding in findings}


def test_no_container_program_is_a_warning_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise SandboxError("neither apptainer nor singularity")

    monkeypatch.setattr(doctor_sandbox, "find_binary", none)
    (finding,) = examine_sandboxes()
    assert finding.grade == "warn" and "neither" in finding.cure


def test_what_held_is_ok_and_what_did_not_is_a_warning() -> None:
    assert set(graded(doctor_sandbox._isolation(GOOD)).values()) == {"ok"}
    bad = Trial(look="3\nCapEff:\t00000000a80425fb\nSeccomp:\t0\n", writable="overlay is refused\nchoose another disk")
    assert set(graded(doctor_sandbox._isolation(bad)).values()) == {"warn"}
    assert [f.cure for f in doctor_sandbox._isolation(bad)][-1] == "choose another disk"


def test_limits_are_stated_with_what_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroups, "find", lambda: Cgroups())
    found = {finding.subject: finding for finding in doctor_sandbox._limits(GOOD)}
    assert {name: finding.grade for name, finding in found.items()} == {
        "memory limit": "warn",  # held, but by looking
        "processes limit": "ok",
        "cpu limit": "warn",
        "disk limit": "ok",
    }
    assert "Delegate=" in found["memory limit"].cure and "Delegate=" in found["cpu limit"].cure
    assert "did not hold" in {f.subject: f for f in doctor_sandbox._limits(Trial())}["disk limit"].found


@pytest.mark.apptainer
def test_the_trial_says_how_each_limit_and_wall_stands() -> None:
    found = list(examine_sandboxes())
    if any(finding.subject == "sandbox trial" and finding.grade == "warn" for finding in found):
        pytest.skip(f"apptainer does not work on this machine: {found[0]}")
    grades = graded(iter(found))
    assert {"network none", "confinement", "writable=image", "sif images"} <= set(grades)
    assert grades["network none"] == grades["confinement"] == grades["disk limit"] == "ok"
    assert not any("did not hold" in finding.found for finding in found)
