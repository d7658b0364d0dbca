"""What a chat template can write, and how it wants to be told: learned by rendering, and for some families known."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_hpc.agents.chat_slots import Slots, slot_of, split, to_json
from prorl_hpc.agents.chat_template import ChatTemplate, TemplateRefusal
from prorl_hpc.agents.tool_formats import get_tool_format

log = logging.getLogger(__name__)

_TAUGHT = {
    "harmony": r"<\|channel\|>commentary",
    "mistral": r"\[TOOL_CALLS\]",
    "deepseek": r"<｜tool▁calls▁begin｜>",
    "qwen_xml": r"<parameter=",
    "hermes": r"""<tool_call>(\\n|\s)*\{\\?['"]""",
    "pythonic": r"<\|tool_call_start\|>\[\" \+ \(|\[func_name1\(|```tool_code",
    "llama_json": r"""\{"name": function name, "parameters":""",
    "json": r"<\|tool_call\|> followed by a JSON list",
}
"""By what a template's text shows that it writes calls in this format; the first that is found counts."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Dialect:
    """Facts about a template. What it does not do itself is written for it: see chat_messages. Of tools it does nothing
    itself if calls are to be in another format than the one that it teaches."""

    system: bool
    """It has system messages."""
    later_system: bool
    """They may come after the first message too."""
    alternates: bool
    """It refuses two messages of the user in a row."""
    tells_tools: bool
    """It tells the model of the tools."""
    tool_role: bool
    """It writes messages of tools."""
    calls: bool
    """It writes an assistant's calls."""
    parallel: bool
    """Several calls in one turn."""
    arguments_as_text: bool
    """A call's arguments are to be a JSON text."""
    none_content: bool
    """The content of a turn with nothing but calls is to be None."""
    call_id_length: int
    """Which length the ids of calls must have; 0: any."""
    reasoning_keys: tuple[str, ...]
    """Under which keys it takes an assistant's thought."""
    tool_format: str
    """In which it teaches to write calls, or is told of when it teaches none."""
    results_one_by_one: bool = False
    """Each result follows the call that it answers (harmony names the tool in the result's header)."""
    moves_prompt: bool = False
    """It writes the system message and the tools before the user's last message, wherever that is (Mistral). Here they
    stay where the first prompt has them."""
    forgets_earlier_calls: bool = False
    """It writes the second turn with calls, or its results, otherwise than the first (DeepSeek V3 and R1 leave out what
    begins them). Here each is written as the first."""


class Probe:
    """Renders small conversations to find a template's dialect."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def dialect(self, tool_format: str) -> Dialect:
        """``tool_format``: a name of agents.tool_formats, or auto; ConfigError for another."""
        if tool_format != "auto":
            get_tool_format(tool_format)
        source = self._template.source
        taught = taught_format(source)
        none_content = bool(re.search(r"content['\"\]]* is (not )?none", source)) and self._writes_calls(none=True)
        as_text = not self._writes_calls(none=none_content) and self._writes_calls(none=none_content, text=True)
        native = bool(taught) and tool_format in ("auto", taught)
        tells = self._tells_tools()
        if tells and not taught and tool_format == "auto":
            log.warning(
                "the chat template %s teaches tool calls in a form that is not known here: tools are told of in the system "
                "message instead, in the form hermes (model.tool_format sets another)",
                self._template.origin,
            )
        return Dialect(
            system=self._accepts([("system", "s"), ("user", "u")]),
            later_system=self._accepts([("user", "u"), ("assistant", "a"), ("system", "s"), ("user", "v")]),
            alternates=not self._accepts([("user", "u"), ("user", "v")]),
            tells_tools=native and tells,
            tool_role=native and self._has_tool_role(tells),
            calls=native and self._writes_calls(none=none_content, text=as_text),
            parallel=native and self._writes_calls(2, none=none_content, text=as_text),
            arguments_as_text=as_text,
            none_content=none_content,
            call_id_length=9 if re.search(r"length (!=|==) 9", source) else 0,
            reasoning_keys=tuple(k for k in _REASONING_KEYS if re.search(rf"(\.|['\"]){k}\b", source))[:1],
            tool_format=(taught or "hermes") if tool_format == "auto" else tool_format,
            results_one_by_one=taught == "harmony",
            moves_prompt="user_messages[-1]" in source,
            forgets_earlier_calls=taught == "deepseek",
        )

    def _accepts(self, turns: Sequence[tuple[str, str]]) -> bool:
        """Whether all contents are written."""
        slots = Slots()
        return self._writes_all([{"role": role, "content": slots.place(text)} for role, text in turns], slots)

    def _writes_all(self, messages: Sequence[Mapping[str, Any]], slots: Slots, tools: Sequence[Any] = ()) -> bool:
        try:
            rendered = self._template.render(messages, tools, add_generation_prompt=True)
        except TemplateRefusal:
            return False
        return set(range(len(slots.texts))) <= {piece.slot for piece in split(rendered)}

    def _tells_tools(self) -> bool:
        slots = Slots()
        user = {"role": "user", "content": slots.place("u")}
        return self._writes_all([user], slots, [sample_tool(slots)])

    def _has_tool_role(self, tells_tools: bool) -> bool:
        if not tells_tools and not re.search(r"""['"](tool|ipython|tool_results)['"]""", self._template.source):
            return False  # it writes whatever role it is given; the model knows none of tools
        # What an assistant's turn with calls wants is another question, so several forms of it are tried.
        return any(self._result_written(none=none, text=text) for none in (False, True) for text in (False, True))

    def _result_written(self, *, none: bool, text: bool) -> bool:
        slots = Slots()
        user = {"role": "user", "content": slots.place("u")}
        turn, _ = self._turn_with_calls(slots, 1, none=none, text=text)
        result = slots.place("r")
        reply = {"role": "tool", "content": result, "name": turn["tool_calls"][0]["function"]["name"]}
        reply["tool_call_id"] = turn["tool_calls"][0]["id"]
        try:
            rendered = self._template.render([user, turn, reply], add_generation_prompt=True)
        except TemplateRefusal:
            return False
        return slot_of(result) in {piece.slot for piece in split(rendered)}

    def _writes_calls(self, count: int = 1, *, none: bool = False, text: bool = False) -> bool:
        slots = Slots()
        user = {"role": "user", "content": slots.place("u")}
        turn, arguments = self._turn_with_calls(slots, count, none=none, text=text)
        try:
            rendered = self._template.render([user, turn], add_generation_prompt=False)
        except TemplateRefusal:
            return False
        return {slot_of(argument) for argument in arguments} <= {piece.slot for piece in split(rendered)}

    def _turn_with_calls(self, slots: Slots, count: int, *, none: bool, text: bool) -> tuple[dict[str, Any], list[str]]:
        arguments = [slots.place(f"x{i}") for i in range(count)]
        calls = [call_dict(slots, f"f{i}", {"c": arg}, f"{i:09d}", text) for i, arg in enumerate(arguments)]
        return {"role": "assistant", "content": None if none else "", "tool_calls": calls}, arguments


def taught_format(source: str) -> str:
    """The format in which a template writes calls; empty if it shows none that is known."""
    return next((name for name, pattern in _TAUGHT.items() if re.search(pattern, source)), "")


def sample_tool(slots: Slots) -> dict[str, Any]:
    """A tool as templates are given it, its texts placed."""
    parameters = {"type": "object", "properties": {"c": {"type": "string", "description": "what"}}, "required": ["c"]}
    function = {
        "name": slots.place_name("f0"),
        "description": slots.place_name("does"),
        "parameters": slots.place_value(parameters, schema=True),
    }
    return {"type": "function", "function": function}


def call_dict(slots: Slots, name: str, arguments: Any, call_id: str, as_text: bool) -> dict[str, Any]:
    """A call as templates are given it; ``arguments`` with its texts placed already."""
    given = to_json(arguments) if as_text else arguments
    return {
        "type": "function",
        "id": slots.place_name(call_id),
        "function": {"name": slots.place_name(name), "arguments": given},
    }
