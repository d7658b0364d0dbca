"""``search``: in the content of files, or for their names. Needs no grep in the image.

The search runs in a child (see file_search.py), which can be killed: a regular expression may take for ever, and a tree
may have no end.
"""

from __future__ import annotations

import time

from prorl_hpc.sandbox.tools.children import Child, Collected
from prorl_hpc.sandbox.tools.file_search import FOUND, NOTHING_FOUND, REFUSED, Query, Search
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused
from prorl_hpc.sandbox.tools.workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar

KINDS = ("content", "name")
MAX_CONTEXT = 50
ERROR_BYTES = 4000


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "search": {
            "pattern": str,
            "path": ".",
            "glob": "",
            "kind": "content",
            "ignore_case": False,
            "hidden": False,
            "context": 0,
            "limit": 200,
        }
    }

    def __init__(self, host: Host) -> None:
        self._host = host
        self._workspace = Workspace(host)

    def search(self, call: Call, **given: Any) -> Generator[float, None, Answer]:
        """kind content: the lines that ``pattern``, a regular expression of Python's, is found in, as path:line:text;
        ``glob`` chooses the files. kind name: the files and directories whose name, or path where the pattern has a
        slash, fits the glob ``pattern``. In the order of their paths, ``limit`` at most; exit code 1 when there are none.
        Hidden files only if ``hidden``; never .git and what is behind links, unless ``path`` is in there."""
        query = Query(**{**self.TOOLS["search"], **given})
        _check(query)
        output, errors = Collected(self._host.settings.output_limit_bytes), Collected(ERROR_BYTES)
        child = Child(self._host, Search(self._workspace, query).report, output.add, errors.add)
        code = yield from child.wait(call, time.monotonic() + call.timeout_s)
        said = errors.data.decode("utf-8", "replace").strip()
        if code == REFUSED:
            raise Refused(said)
        if code not in (None, FOUND, NOTHING_FOUND):
            raise OSError(f"the search ended with exit code {code}: {said}")
        text = output.data.decode("utf-8", "replace")
        if output.overflow:
            text = text[: text.rfind("\n") + 1] + "[... cut here: narrow the pattern, the path or the glob]\n"
        if code is None:
            why = "cancelled" if call.cancelled else f"timed out after {call.timeout_s:g} s"
            text += f"[{why}: simplify the pattern, or narrow the path or the glob; only what is above was found]\n"
        return Answer(text, code, timed_out=code is None)


def _check(query: Query) -> None:
    if query.kind not in KINDS:
        raise Refused(f"kind {query.kind!r} is unknown: {' or '.join(KINDS)}")
    if not query.pattern:
        raise Refused("pattern is empty: everything would be found")
    if not 0 <= query.context <= MAX_CONTEXT or query.limit < 1:
        raise Refused(
            f"context {query.context}, limit {query.limit}: context is 0 to {MAX_CONTEXT} lines, limit 1 or more"
        )
    if query.kind == "name" and (query.glob or query.context):
        raise Refused("glob and context are for kind content; with kind name the pattern itself is a glob")
