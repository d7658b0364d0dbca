"""The tools of the native loop: what a model is told of each, and what a call of it does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import ToolSchema
from prorl_hpc.sandbox.protocol import Sandbox, ToolResult
from prorl_hpc.tasks.protocol import WebSearch

FINISH = "finish"


class Tool(Protocol):
    """``schema`` is what the model is told."""

    @property
    def schema(self) -> ToolSchema: ...

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox, timeout_s: float) -> ToolResult:
        """``arguments`` fit the schema. Raises SandboxError."""
        ...


def _schema(name: str, description: str, required: tuple[str, ...], **properties: dict[str, Any]) -> ToolSchema:
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": list(required)})


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


@dataclass(frozen=True)
class SandboxTool:
    """A tool of the sandbox's tool server."""

    schema: ToolSchema

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox, timeout_s: float) -> ToolResult:
        whole = {name: int(value) if isinstance(value, float) else value for name, value in arguments.items()}
        return await sandbox.call(self.schema.name, whole, timeout_s)


@dataclass(frozen=True)
class Notepad:
    """Nothing happens: the model writes for itself, or ends (the loop sees to that)."""

    schema: ToolSchema

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox, timeout_s: float) -> ToolResult:
        return ToolResult("(noted)")


@dataclass(frozen=True)
class Searching:
    """Asks the web from outside the sandbox, which has no network."""

    schema: ToolSchema
    search: WebSearch

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox, timeout_s: float) -> ToolResult:
        try:
            return ToolResult(await self.search(arguments["query"], timeout_s) or "(nothing found)")
        except (OSError, TimeoutError) as error:
            return ToolResult(f"the search does not answer: {str(error) or type(error).__name__}", exit_code=1)


_SCHEMAS = {
    "bash": _schema(
        "bash",
        "Run a command in a bash shell. Its directory, variables and background jobs stay from call to call.",
        ("command",),
        command=_text("The command; several lines are allowed."),
    ),
    "ipython": _schema(
        "ipython",
        "Run Python code in an IPython session that stays from call to call. Output and the last value are shown.",
        ("code",),
        code=_text("Python code."),
    ),
    "edit": _schema(
        "edit",
        "View and change text files. view shows a file with line numbers, or a directory; create writes a file; "
        "str_replace replaces the one place that reads old by new; insert puts text after a line; undo takes the last "
        "change of the file back.",
        ("command", "path"),
        command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo"]},
        path=_text("The file."),
        text=_text("For create: the content. For insert: the lines."),
        old=_text("For str_replace: the text to replace, which must occur exactly once."),
        new=_text("For str_replace: the new text."),
        line=_number("For insert: the line after which the text goes; 0 is the file's beginning."),
        view_from=_number("For view: the first line."),
        view_to=_number("For view: the last line."),
    ),
    "think": _schema("think", "Write a thought down. Nothing happens.", ("thought",), thought=_text("The thought.")),
    FINISH: _schema(FINISH, "Give the final answer. This ends the task.", ("answer",), answer=_text("The answer.")),
    "web_search": _schema("web_search", "Search the web.", ("query",), query=_text("What to search for.")),
}
TOOLS = tuple(_SCHEMAS)
"""Names of all tools."""


def make_tools(names: Iterable[str], search: WebSearch | None = None) -> dict[str, Tool]:
    """Tools by name, in this order. ConfigError for unknown ones, and for web_search without ``search``."""
    return {name: _make(name, search) for name in names}


def check_tool_names(names: Iterable[str], where: str) -> None:
    """ConfigError that names the first unknown one; ``where`` is the setting or field."""
    for name in names:
        if name not in TOOLS:
            near = difflib.get_close_matches(str(name), TOOLS, n=1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{where} has {name!r}, which is no tool: {suggestion}There are {', '.join(TOOLS)}")


def _make(name: str, search: WebSearch | None) -> Tool:
    check_tool_names([name], "task.tools")
    schema = _SCHEMAS[name]
    if name in ("think", FINISH):
        return Notepad(schema)
    if name != "web_search":
        return SandboxTool(schema)
    if search is None:
        raise ConfigError("task.tools has web_search, but task.web_search_url is empty: set it, or leave the tool out")
    return Searching(schema, search)
