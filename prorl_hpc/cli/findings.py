"""What `prorl-hpc doctor` says of one thing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GRADES = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """``grade``: ok, warn (something will be slower or missing) or fail (runs will not work). ``where``: the component and
    its node, or empty for this machine."""

    grade: str
    subject: str
    found: str
    cure: str = ""
    where: str = ""


def judged(subject: str, found: str, cure: str, *, good: bool, grade: str = "warn") -> Finding:
    """Ok, without a cure, if ``good``; else of ``grade``."""
    return Finding("ok", subject, found) if good else Finding(grade, subject, found, cure)


def summary(findings: Iterable[Finding]) -> str:
    """One line."""
    findings = list(findings)
    told = [f"{len(findings)} checks"]
    for grade, what in (("fail", "failed"), ("warn", "slower or missing")):
        if subjects := list(dict.fromkeys(_named(f) for f in findings if f.grade == grade)):
            told.append(f"{what}: {', '.join(subjects)}")
    return "; ".join(told) if len(told) > 1 else f"{told[0]}, nothing stands in the way"


def _named(finding: Finding) -> str:
    return f"{finding.subject} ({finding.where})" if finding.where else finding.subject


def worst(findings: Iterable[Finding]) -> str:
    """The worst grade of all."""
    return max((finding.grade for finding in findings), key=GRADES.index, default="ok")
