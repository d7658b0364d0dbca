"""What the agent loop is given: its tools, the format of calls, and where it ends."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from urllib.parse import urlsplit

from prorl_hpc.config.schema import ProrlConfig

TOOL_NAMES = ("bash", "ipython", "edit", "think", "finish", "web_search")
"""agents.tools.TOOLS, which this room does not import."""
TOOL_FORMAT_NAMES = (
    "hermes",
    "qwen_xml",
    "llama_json",
    "pythonic",
    "mistral",
    "deepseek",
    "harmony",
    "bash_block",
    "json",
)
"""agents.tool_formats.TOOL_FORMATS."""
NO_TOOLS = "none"
_OWN_TOOLS = ("file_trail", "file_quest", "reasoning_gym", "text_env", "verifiers")
_TOOLS_OF_SOLVE = ["bash"]
"""What task=solve sets, whoever the agent is."""


def tool_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    yield from _formats(config)
    yield from _tools(config)
    task = config.task
    if task.max_repeats < 0 or task.max_repeats == 1:
        yield f"task.max_repeats={task.max_repeats}: must be 0 (never), or 2 or more turns that are the same"
    if task.max_rollout_tokens < 0:
        yield f"task.max_rollout_tokens={task.max_rollout_tokens}: must be 0 (no limit of its own) or more"
    if not all(task.stop):
        yield "task.stop has an empty text, which every turn contains: leave it out"


def unused_tools(config: ProrlConfig) -> Iterator[str]:
    """A warning where ``task.tools`` is given to those who have tools of their own."""
    tools, name = config.task.tools, config.task.name
    if tools and name in _OWN_TOOLS:
        yield f"task.tools={tools} has no effect with task.name={name}, whose tools are its own: it is for task=solve"
    elif tools not in ([], _TOOLS_OF_SOLVE) and config.agent.kind == "outside":
        yield f"task.tools={tools} has no effect with agent.kind=outside: agent {config.agent.name} brings its own tools"


def _formats(config: ProrlConfig) -> Iterator[str]:
    models = {"model": config.model} | {f"policies.{name}.model": p.model for name, p in config.policies.items()}
    for where, model in models.items():
        name = model.tool_format
        if name not in ("auto", *TOOL_FORMAT_NAMES):
            near = difflib.get_close_matches(name, TOOL_FORMAT_NAMES, n=1, cutoff=0.5)
            suggestion = f" (did you mean {near[0]}?)" if near else ""
            yield f"{where}.tool_format={name}: must be one of auto, {', '.join(TOOL_FORMAT_NAMES)}{suggestion}"
        elif name == "bash_block" and (others := [t for t in config.task.tools if t not in ("bash", NO_TOOLS)]):
            yield f"{where}.tool_format=bash_block can call bash alone, but task.tools has {', '.join(others)} too"


def _tools(config: ProrlConfig) -> Iterator[str]:
    tools, url = config.task.tools, config.task.web_search_url
    allowed = f"{', '.join(TOOL_NAMES)}; or [{NO_TOOLS}] alone for plain chat"
    for name in dict.fromkeys(tools):
        if name == NO_TOOLS and tools != [NO_TOOLS]:
            yield f"task.tools={tools}: {NO_TOOLS} must be alone"
        elif name not in (*TOOL_NAMES, NO_TOOLS):
            near = difflib.get_close_matches(name, TOOL_NAMES, n=1)
            suggestion = f" (did you mean {near[0]}?)" if near else ""
            yield f"task.tools has {name!r}, which is no tool{suggestion}: there are {allowed}"
        elif tools.count(name) > 1:
            yield f"task.tools has {name} {tools.count(name)} times: once is enough"
    if "web_search" in tools and not url:
        yield "task.tools has web_search, but task.web_search_url is empty: set it, or leave the tool out"
    if url and (urlsplit(url).scheme not in ("http", "https") or "{query}" not in url):
        yield f"task.web_search_url={url}: must be an http or https URL with {{query}} where the query goes"
