"""The instructions of a Dockerfile: lines joined, comments and the texts of heredocs taken out."""

from __future__ import annotations

import re
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError


def instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line number, instruction, what follows it), with lines joined and comments taken out as Docker does."""
    found: list[tuple[int, str, str]] = []
    pending, start = "", 0
    within: list[str] = []  # heredocs that are open
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if within:
            within = within[1:] if line.strip() == within[0] else within
            continue
        if line.lstrip().startswith("#") or (not line.strip()):
            if (match := re.match(r"\s*#\s*escape\s*=\s*(\S)", line)) and match[1] != "\\":
                raise SandboxError(f"{path}, line {number}: only \\ can be the escape character")
            continue
        start = start if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        words = (pending + line).strip().split(None, 1)
        found.append((start, words[0].upper(), words[1] if len(words) > 1 else ""))
        within = heredocs(*found[-1][1:])
        pending = ""
    if pending:
        raise SandboxError(f"{path} ends within the instruction of line {start}")
    return found


def heredocs(instruction: str, rest: str) -> list[str]:
    """The words that end the heredocs of an instruction."""
    if instruction not in ("RUN", "COPY", "ADD"):
        return []
    return [match[1] for match in re.finditer(r"(?<!<)<<-?['\"]?(\w+)['\"]?(?=\s|$)", rest)]
