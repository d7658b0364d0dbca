"""What doctor says of a machine that lacks programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.cli import doctor_machine
from prorl_hpc.cli.findings import Finding, summary


def test_user_namespaces_are_tried_without_the_unshare_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_programs = list(doctor_machine.user_namespaces())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(doctor_machine.user_namespaces()) == with_programs
    assert with_programs[0].grade == "ok" or len(with_programs[0].found) > len("refused: ")


@pytest.mark.parametrize(
    ("forbidden", "cure"),
    [(True, "the admin changes kernel.ostype="), (False, "no sysctl forbids them")],
)
def test_refused_user_namespaces_have_their_cause(monkeypatch: pytest.MonkeyPatch, forbidden: bool, cure: str) -> None:
    monkeypatch.setattr(doctor_machine, "said", lambda *command: (1, "unshare: Operation not permitted"))
    value = Path("/proc/sys/kernel/ostype").read_text().strip() if forbidden else "another"
    monkeypatch.setattr(doctor_machine, "_FORBIDS", {"kernel/ostype": value})
    (finding,) = doctor_machine.user_namespaces()
    assert finding.grade == "warn" and finding.found == "refused: unshare: Operation not permitted"
    assert cure in finding.cure


def test_the_summary_names_what_is_missing() -> None:
    good, missing, bad = Finding("ok", "a", ""), Finding("warn", "sandbox", ""), Finding("fail", "engine", "")
    assert summary([good]) == "1 checks, nothing stands in the way"
    assert summary([good, missing]) == "2 checks; slower or missing: sandbox"
    assert summary([good, missing, bad]) == "3 checks; failed: engine; slower or missing: sandbox"


def test_without_a_container_program_it_is_said_that_no_sandbox_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor_machine.sandbox()
    assert finding.grade == "warn" and "no sandbox starts" in finding.found
