"""Group ``agent``: what an outside agent is started as, and where its answer is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from prorl_hpc.config.schema import AgentConfig, ProrlConfig

KINDS = ("native", "outside")
PLACEHOLDERS = ("instruction", "instruction_file", "model", "openai_url", "anthropic_url", "key")
"""What is filled in, written {name}, in command, env and files."""
ANSWERS = "last_message, stdout, or file:NAME with a name in the workspace"
_BRACED = re.compile(r"(?<![${])\{([a-z_]+)\}(?!\})")
"""Not the shell's ${name}, nor {{name}}."""


def agent_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    agent = config.agent
    if agent.max_tokens < 0:
        yield (
            f"agent.max_tokens={agent.max_tokens}: must be a number of tokens, or 0 for 16 times model.max_context_tokens"
        )
    if agent.max_calls < 1:
        yield f"agent.max_calls={agent.max_calls}: must be at least 1"
    kind, _, name = agent.answer.partition(":")
    if agent.answer not in ("last_message", "stdout") and (kind != "file" or not _in_workspace(name)):
        yield f"agent.answer={agent.answer}: must be {ANSWERS}"
    if agent.kind not in KINDS:
        yield f"agent.kind={agent.kind}: must be one of {', '.join(KINDS)}"
    elif agent.kind == "native":
        yield from _native(agent)
    else:
        yield from _command(agent)
        yield from _files(agent)
        yield from _binds(agent)
        if config.sandbox.warm:
            yield (
                f"sandbox.warm={config.sandbox.warm}: sandboxes that are kept ready have no door to the LLM gateway, which "
                "outside agents need: set sandbox.warm=0, or agent=native"
            )


def _native(agent: AgentConfig) -> Iterator[str]:
    given = [name for name in ("image", "command", "env", "files", "binds") if getattr(agent, name)]
    if given:
        names, have = " and ".join(f"agent.{name}" for name in given), "have" if len(given) > 1 else "has"
        yield (
            f"{names} {have} no effect with agent.kind=native: set agent.kind=outside (in a file of yours, add the line "
            "kind: outside), or choose an agent (agent=mini_swe_agent)"
        )


def _command(agent: AgentConfig) -> Iterator[str]:
    if not agent.command or not agent.command[0].strip():
        whose = "that agent.kind=outside starts" if agent.name == "native" else f"of agent {agent.name}"
        yield (
            f"agent.command={agent.command}: must be the program {whose} and its arguments, such as "
            "[python3, agent.py, '{instruction}']; or choose an agent that has one (agent=mini_swe_agent)"
        )
    for name in agent.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"agent.env: {name!r} must be the name of an environment variable: letters, digits and _"
    texts = [
        *(("agent.command", word) for word in agent.command),
        *((f"agent.env.{n}", v) for n, v in agent.env.items()),
    ]
    for where, text in texts:
        for name in _BRACED.findall(text):
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                yield f"{where} has {{{name}}}, which nothing is filled in for: there are {known}; {{{{{name}}}}} is left alone"


def _files(agent: AgentConfig) -> Iterator[str]:
    for name in agent.files:
        if not _in_workspace(name):
            yield f"agent.files: {name!r} must be the name of a file in the workspace, without a leading / and without .."


def _binds(agent: AgentConfig) -> Iterator[str]:
    for bind in agent.binds:
        parts = bind.split(":")
        if len(parts) > 2 or not all(part.startswith("/") and "," not in part for part in parts):
            yield f"agent.binds: {bind!r} must be an absolute path, or two of them as /path:/inside, without commas"


def _in_workspace(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
