"""Whether the shell lines of a site can be read by a shell, asked before a job carries them to its nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from prorl_hpc.config.schema import ClusterConfig


def setup_problems(cluster: ClusterConfig) -> Iterator[str]:
    """Each as a sentence that names the line."""
    lists = {"cluster.setup": cluster.setup}
    lists |= {f"cluster.{name}.setup": getattr(cluster, name).setup for name in ("rollout", "inference", "trainer")}
    for where, lines in lists.items():
        if lines:
            yield from _unreadable(where, lines)


def _unreadable(where: str, lines: list[str]) -> Iterator[str]:
    """Each list by itself: more lines, and the program that is to run, come behind it. bash warns of a here-document
    without an end, which would swallow them; so its every word counts."""
    text = "\n".join(lines).encode(errors="backslashreplace")
    try:  # extglob: a setup may switch it on, and what is read with it is a little more
        done = subprocess.run(
            ["bash", "--norc", "-O", "extglob", "-n", "/dev/stdin"],
            input=text,
            capture_output=True,
            timeout=20,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"{where} cannot be checked: bash does not run here: {error}"
        return
    if done.returncode == 0 and not done.stderr:
        return
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
    number = re.search(r"at line (\d+)", said[0]) or re.search(r"line (\d+)", said[0])
    at = min(int(number[1]), len(lines)) if number else len(lines)
    reason = re.sub(r"^\S+: (line \d+: )?(warning: )?", "", said[0])
    yield f"{where}, line {at}, {lines[at - 1]!r}: bash cannot read it: {reason}"
