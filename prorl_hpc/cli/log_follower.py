"""Prints what is added to the logs of an attempt, whole lines only, with names where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prorl_hpc.cli.log_names import log_files, wanted_names
from prorl_hpc.config.run_directory import RunDirectory

_AT_ONCE_BYTES = 1 << 20


def last_lines(file: Path, size: int, lines: int) -> list[str]:
    """The last ``lines`` of what the first ``size`` bytes hold, looked for in 1 MiB."""
    with file.open("rb") as log:
        log.seek(max(0, size - _AT_ONCE_BYTES))
        text = log.read(min(size, _AT_ONCE_BYTES))
    return text.decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


class LogFollower:
    """``places``: how much of each file has been printed."""

    def __init__(self, components: Sequence[str], places: dict[Path, int]) -> None:
        self._components, self._places = components, places

    def print_new(self, run: RunDirectory, *, last: bool) -> None:
        """Once over all files of the attempt, those included that have come to be; ``last``: lines that lack their end
        too."""
        files = log_files(run)
        names = wanted_names(self._components, list(files), living=True)
        width = max(map(len, names), default=0)
        for name in names:
            prefix = f"{name:<{width}} | " if len(names) > 1 else ""
            while lines := self._new_lines(files[name], last):
                for line in lines:
                    print(prefix + line, flush=True)

    def _new_lines(self, file: Path, last: bool) -> list[str]:
        place = self._places.get(file, 0)
        try:
            with file.open("rb") as log:
                log.seek(place)
                text = log.read(_AT_ONCE_BYTES)
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        if not whole and (last or len(text) == _AT_ONCE_BYTES):  # a line that never ends goes out in pieces
            whole = text
        self._places[file] = place + len(whole)
        return whole.decode(errors="replace").splitlines()
