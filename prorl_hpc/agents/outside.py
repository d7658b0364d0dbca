"""Outside agents: a program in the sandbox, unmodified, that takes the LLM gateway for its provider.

The sandbox's tool ``agent`` (sandbox.tools.agent_runner) starts it beside a door on loopback that leads to the gateway's
socket and nowhere else. What it says to the model is the gateway's to record; here it is started, waited for, and asked
for its answer. A program that never got to talk to the model is an AgentError, which fails the rollout: a reward of 0
would hide it. One that ended badly later has no answer and is scored; ``agent_exit_code`` among the metrics and the log
tell of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from prorl_hpc.agents.tool_loop import LoopOutcome
from prorl_hpc.config.schema import AgentConfig
from prorl_hpc.messages.errors import ConfigError, ProrlError, SandboxError
from prorl_hpc.sandbox.protocol import Sandbox, SandboxNeeds, ToolResult
from prorl_hpc.tasks.protocol import AgentHandler, GatewaySession

log = logging.getLogger(__name__)

SOCKET = "llm"
"""The gateway's name among the sandbox's sockets."""
_NO_LIMIT_S = 1e7
"""RUN's budget ends an agent: it cancels the call."""
_LEAVE_S = 10.0
"""How long a program may go on when its session is over: its calls or tokens are used up."""
_KILLED = 137
"""128 + SIGKILL, as shells have it."""
_SHOWN_CHARS = 2000
_LAST_CHARS = 250
"""Of its output in a failure's message: its last lines."""
_COMMAND_CHARS = 80
_FRAME = " \t│╭╰╮╯─┃❱"


class AgentError(ProrlError):
    """An outside agent that could not be started, or never called its model."""


class Report(msgspec.Struct, frozen=True):
    """What agent_runner.py says at the end."""

    exit_code: int | None
    problem: str
    stdout: str
    output: str
    seconds: float


@dataclass
class OutsideOutcome(LoopOutcome):
    """``turns`` are the calls of the model."""

    exit_code: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "agent_exit_code": self.exit_code, "agent_seconds": self.seconds}


@dataclass(frozen=True)
class OutsideAgent:
    """The program of group ``agent``."""

    config: AgentConfig

    def needs(self, needs: SandboxNeeds, gateway_socket: str) -> SandboxNeeds:
        """What the sandbox of RUN is started with, where the task alone would need ``needs``."""
        return replace(
            needs,
            image=self.config.image or needs.image,
            sockets={**needs.sockets, SOCKET: gateway_socket},
            binds={**needs.binds, **dict(map(parse_bind, self.config.binds))},
        )

    async def run(self, sandbox: Sandbox, instruction: str, session: GatewaySession, *, model: str) -> OutsideOutcome:
        """Start the program, for which the policy has the name ``model``, and wait for its end; cancelling ends it. Raises
        AgentError, SandboxError, and InferenceError if the LLM server broke."""
        values = {"instruction": instruction, "model": model, "key": session.key}
        report = await self._play(sandbox, values, session)
        if session.failure is not None:
            raise session.failure
        if report.exit_code is None:
            raise AgentError(
                f"agent {self.config.name} could not be started: {report.problem}. It must be in the sandbox's image (agent.image) "
                "or in a directory of the node that is bound into it (agent.binds), and on the PATH there (agent.env.PATH)"
            )
        said = report.output[-_SHOWN_CHARS:].strip() or "nothing"
        if session.calls == 0:
            log.warning("agent %s had no answer of its model; its last output: %s", self.config.name, said)
            raise AgentError(self._without_a_call(report.exit_code, session.refused, report.output))
        if report.exit_code != 0:
            log.warning(
                "agent %s ended with exit code %d; its last output: %s", self.config.name, report.exit_code, said
            )
        answer = None if report.exit_code else await self._answer(sandbox, session, report)
        return OutsideOutcome(answer, turns=session.calls, exit_code=report.exit_code, seconds=report.seconds)

    def _without_a_call(self, code: int, refused: str, output: str) -> str:
        """What matters first: those who show the message may cut it."""
        what = (
            f"never had an answer of its model, whose last call was refused: {refused}"
            if refused
            else "never called its model"
        )
        command = shortened(" ".join(" ".join(self.config.command).split()), _COMMAND_CHARS)
        said = last_lines(output, _LAST_CHARS) or "nothing"
        return f"agent {self.config.name} ended with exit code {code} and {what}; its last output: {said} (agent.command: {command})"

    async def _play(self, sandbox: Sandbox, values: dict[str, str], session: GatewaySession) -> Report:
        """To the program's end; it is killed when it does not end although the model answers no more."""
        job: dict[str, Any] = {
            "command": self.config.command,
            "env": environment(self.config.env),
            "files": self.config.files,
            "values": values,
            "socket": SOCKET,
        }
        playing = asyncio.create_task(sandbox.call("agent", job, _NO_LIMIT_S))
        over = asyncio.create_task(session.wait_over())
        try:
            await asyncio.wait({playing, over}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                await asyncio.wait({playing}, timeout=0 if session.failure else _LEAVE_S)
            if playing.done():
                return report_of(playing.result())
            return Report(
                _KILLED, "", "", f"[it went on for {_LEAVE_S:g} s after the model's last answer: killed]", 0.0
            )
        finally:
            over.cancel()
            playing.cancel()
            await asyncio.gather(over, playing, return_exceptions=True)

    async def _answer(self, sandbox: Sandbox, session: GatewaySession, report: Report) -> str | None:
        where = self.config.answer
        if where == "last_message":
            return session.last_text.strip() or None
        if where == "stdout":
            return report.stdout.strip() or None
        try:
            content = await sandbox.download(where.removeprefix("file:"))
        except SandboxError as error:
            log.info("agent %s has left no answer: %s", self.config.name, error)
            return None
        return content.decode("utf-8", "replace").strip() or None


def can_be_told(handler: AgentHandler) -> bool:
    """Whether the task can be told to an outside agent: ``instruction(row)``."""
    return callable(getattr(handler, "instruction", None))


def told_problem(task: str) -> str:
    return (
        f"task {task} cannot be played by an outside agent: its handler has no method instruction(row), which tells the whole "
        "task in words; choose another task, or agent=native"
    )


def instruction_of(handler: AgentHandler, task: str, row: Mapping[str, Any]) -> str:
    """The task in words; ConfigError if the handler has none."""
    if not can_be_told(handler):
        raise ConfigError(told_problem(task))
    return str(handler.instruction(row))  # type: ignore[attr-defined]  # optional, see AgentHandler


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of the program, with placeholders: what each SDK reads, and ``own`` over it."""
    return {
        "OPENAI_BASE_URL": "{openai_url}",
        "OPENAI_API_KEY": "{key}",
        "ANTHROPIC_BASE_URL": "{anthropic_url}",
        "ANTHROPIC_API_KEY": "{key}",
        **own,
    }


def parse_bind(text: str) -> tuple[str, str]:
    """``/path`` or ``/path:/inside`` as (path on the node, path inside)."""
    path, _, inside = text.partition(":")
    return path, inside or path


def last_lines(output: str, most: int) -> str:
    """As many as fit into ``most`` characters, joined by " | ", without drawn frames; of a longer last line its end."""
    kept = ""
    for line in reversed(output.splitlines()):
        line = " ".join(line.strip(_FRAME).split())
        if line and kept and len(line) + len(kept) > most:
            break
        kept = f"{line} | {kept}" if line and kept else line or kept
    return kept if len(kept) <= most else f"…{kept[-most:]}"


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def report_of(result: ToolResult) -> Report:
    """SandboxError if the runner itself broke."""
    if result.exit_code != 0:
        raise SandboxError(
            f"the runner of the outside agent ended with exit code {result.exit_code}: {result.output[-_SHOWN_CHARS:]}"
        )
    line, _, notices = result.output.partition("\n")  # what was done to the sandbox meanwhile: a limit that was passed
    try:
        report = msgspec.json.decode(line, type=Report)
        return replace_fields(report, output=f"{report.output}{notices}")
    except msgspec.DecodeError as error:
        raise SandboxError(
            f"the runner of the outside agent gave no report ({error}): {result.output[:200]!r}"
        ) from None
