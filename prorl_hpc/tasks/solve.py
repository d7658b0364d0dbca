"""Any problem with tools or without: a prompt, perhaps files, and either the right answer or a command that checks.

A row has ``id`` and ``prompt``, and either ``answer`` (compared as ``compare`` says: exact, numeric, choice) or ``check``, a
shell command whose exit code 0 is reward 1. ``files`` (name → content) are in the workspace from the start, ``check_files``
only when the check runs. With ``fresh`` the check runs in a new sandbox, which has ``files``, then the agent's ``outputs``
(names of files), then ``check_files``. ``system`` and ``tools`` ([]: plain chat) override the task's settings.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from prorl_hpc.agents.loop_format import NativeFormat
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.agents.tools import TOOLS, check_tool_names, make_tools
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.answers import COMPARE, choice, final_answer, numeric
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import in_split, require
from prorl_hpc.tasks.solve_rows import draw_row

NO_TOOLS = "none"
_DEFAULT_TOOLS = ("bash",)
_SYSTEM = "Solve the problem. Use the tools if they help. When you are done, say the final answer alone."
_SYSTEM_CHAT = "Solve the problem. End with a line that says answer: and the final answer alone."
_FIELDS = ("id", "prompt", "answer", "compare", "check", "check_files", "files", "fresh", "outputs", "system", "tools")
_CHECK_TIMEOUT_S = 60.0
_DRAWS_PER_ROW = 100


class Solve:
    """An AgentHandler. Options: ``compare`` (for rows that do not say; exact), ``check_timeout_s`` (60)."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("compare", "check_timeout_s"))
        self._task = task
        self._compare = str(task.options.get("compare", "exact"))
        if self._compare not in COMPARE:
            raise ConfigError(f"task.options.compare={self._compare} must be one of {', '.join(COMPARE)}")
        timeout = task.options.get("check_timeout_s", _CHECK_TIMEOUT_S)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"task.options.check_timeout_s={timeout} must be a number of seconds greater than 0")
        self._check_timeout_s = float(timeout)
        names = list(task.tools) or list(_DEFAULT_TOOLS)
        self._tools: list[str] = [] if names == [NO_TOOLS] else names

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        source = random.Random(f"{split}:{seed}")
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(size * _DRAWS_PER_ROW):
            row = draw_row(source, len(rows))
            if in_split(split, row["prompt"]):
                rows.setdefault(row["prompt"], {"id": f"{split}-{seed}-{len(rows)}", **row})
            if len(rows) == size:
                return list(rows.values())
        raise ConfigError(
            f"task.{split}.size={size} is more than the built-in problems of solve ({len(rows)}): lower it"
        )

    def check_row(self, row: Mapping[str, Any]) -> None:
        require(row, "prompt", str)
        if unknown := sorted(set(row) - set(_FIELDS)):
            raise ValueError(f"field {unknown[0]} is unknown: expected {', '.join(_FIELDS)}")
        if ("answer" in row) == ("check" in row):
            raise ValueError("expected either field answer (to compare with) or field check (a shell command)")
        require(row, "answer" if "answer" in row else "check", str)
        if (compare := row.get("compare", self._compare)) not in COMPARE:
            raise ValueError(f"field compare is {compare!r}, expected one of {', '.join(COMPARE)}")
        if "answer" in row:
            _check_answer(row["answer"], compare)
        for field in ("files", "check_files"):
            _check_files(row, field)
        _check_names(row, "outputs")
        if not isinstance(row.get("system", ""), str):
            raise ValueError(f"field system is a {type(row['system']).__name__}, expected a str")
        if not isinstance(row.get("fresh", False), bool):
            raise ValueError(f"field fresh is {row['fresh']!r}, expected true or false")
        if row.get("fresh") and "check" not in row:
            raise ValueError("field fresh is true, but there is no check that could run in a fresh sandbox")
        if bool(row.get("fresh")) != bool(row.get("outputs")):
            raise ValueError(
                "fields fresh and outputs go together: with fresh: true the check sees of the agent's work only the files that "
                "outputs names, and without it all of them"
            )
        self._check_tools(row)

    def eval_in_fresh_sandbox(self, row: Mapping[str, Any]) -> bool:
        return bool(row.get("fresh", False))

    def instruction(self, row: Mapping[str, Any]) -> str:
        """For outside agents, which have tools and a system prompt of their own."""
        end = "End with a line that says answer: and the final answer alone." if "answer" in row else ""
        return f"{row['prompt']}\n\n{end}".strip()

    async def init(self, context: RolloutContext) -> None:
        await _upload(context, context.spec.row.get("files", {}))

    async def run(self, context: RolloutContext) -> None:
        row, conversation = context.spec.row, context.require_conversation()
        names: Sequence[str] = row.get("tools", self._tools)
        loop = ToolLoop(
            NativeFormat(get_tool_format(conversation.tool_format), self._task.observation_limit_chars),
            self._task.max_turns,
            self._task.call_timeout_s,
            make_tools(names, context.web_search),
            max_repeats=self._task.max_repeats,
        )
        system = row.get("system") or self._task.system_prompt or (_SYSTEM if names else _SYSTEM_CHAT)
        messages = [Message("system", system), Message("user", row["prompt"])]
        context.notes["outcome"] = await loop.run(conversation, context.sandbox, messages)
        await self.collect(context)

    async def collect(self, context: RolloutContext) -> None:
        """Take the agent's outputs along, whoever the agent was."""
        if context.spec.row.get("fresh"):
            context.notes["outputs"] = await _download(context, context.spec.row.get("outputs", []))

    async def eval(self, context: RolloutContext) -> Evaluation:
        row, outcome = context.spec.row, context.notes["outcome"]
        assert isinstance(outcome, LoopOutcome), "RUN leaves a LoopOutcome"
        if "check" in row:
            return await self._run_check(context, outcome)
        compare = COMPARE[row.get("compare", self._compare)]
        right = outcome.answer is not None and compare(final_answer(outcome.answer), row["answer"])
        return Evaluation(float(right), outcome.metrics())

    async def _run_check(self, context: RolloutContext, outcome: LoopOutcome) -> Evaluation:
        row = context.spec.row
        if row.get("fresh"):
            await _upload(context, row.get("files", {}))
            for name, content in context.notes["outputs"].items():
                await context.sandbox.upload(name, content)
        await _upload(context, row.get("check_files", {}))
        result = await context.sandbox.exec(["/bin/sh", "-c", row["check"]], self._check_timeout_s)
        metrics = {**outcome.metrics(), "check_timed_out": float(result.timed_out)}
        return Evaluation(float(result.exit_code == 0), metrics)

    def _check_tools(self, row: Mapping[str, Any]) -> None:
        tools = row.get("tools", [])
        if not isinstance(tools, list):
            raise ValueError(f"field tools is a {type(tools).__name__}, expected a list of {', '.join(TOOLS)}")
        try:
            check_tool_names(tools, "field tools")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if "web_search" in tools and not self._task.web_search_url:
            raise ValueError("field tools has web_search, but task.web_search_url is empty")


def _check_answer(answer: str, compare: str) -> None:
    """That a model can be right at all."""
    if compare == "numeric" and not numeric(answer, answer):
        raise ValueError(
            f"field answer is {answer!r}, expected a number, such as 12, -3.5, 2/3 or 50%: compare is numeric"
        )
    if compare == "choice" and not choice(answer, answer):
        raise ValueError(f"field answer is {answer!r}, expected a single letter, such as B: compare is choice")


def _check_files(row: Mapping[str, Any], field: str) -> None:
    files = row.get(field, {})
    if not isinstance(files, dict):
        raise ValueError(f"field {field} is a {type(files).__name__}, expected names and contents")
    for name, content in files.items():
        _check_name(name, field)
        if not isinstance(content, str):
            raise ValueError(f"field {field}.{name} is a {type(content).__name__}, expected a str")


def _check_names(row: Mapping[str, Any], field: str) -> None:
    names = row.get(field, [])
    if not isinstance(names, list):
        raise ValueError(f"field {field} is a {type(names).__name__}, expected a list of file names")
    for name in names:
        _check_name(name, field)


def _check_name(name: Any, field: str) -> None:
    if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"field {field} has the name {name!r}: expected a path inside the sandbox's workspace")


async def _upload(context: RolloutContext, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        await context.sandbox.upload(name, content.encode())


async def _download(context: RolloutContext, names: Sequence[str]) -> dict[str, bytes]:
    """The files that the agent made; one that is missing is left out, which is for the check to find."""
    found: dict[str, bytes] = {}
    for name in names:
        listed = await context.sandbox.exec(["/bin/sh", "-c", 'test -f "$1"', "sh", name], _CHECK_TIMEOUT_S)
        if listed.exit_code == 0:
            found[name] = await context.sandbox.download(name)
    return found
