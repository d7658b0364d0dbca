"""A model directory's Jinja chat template, rendered as transformers renders it, but without transformers."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl_hpc.agents.chat_slots import to_json
from prorl_hpc.messages.errors import ConfigError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json_file(path: Path) -> dict[str, Any]:
    """The object in ``path``, {} if there is no such file; ConfigError if it does not parse."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


class TemplateRefusal(ConfigError):
    """The template raises for what it is given."""


class ChatTemplate:
    """``render`` gives the text of a conversation; errors of the template come out as TemplateRefusal."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """``special_tokens``: bos_token, eos_token, … as the template may write them. ``origin``: for messages."""
        self.source = source
        self.origin = origin
        self.settings: dict[str, Any] = {}
        """Further variables of the template, such as enable_thinking."""
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _raise_exception
        # The day is that of loading: prompts of one run must not change at midnight.
        loaded = time.localtime()
        environment.globals["strftime_now"] = lambda layout: time.strftime(layout, loaded)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """What the template takes from outside."""
        except TemplateError as error:
            line = f", line {error.lineno}," if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"the chat template {origin}{line} does not parse: {error.message}") from error

    @classmethod
    def open(cls, model_dir: Path) -> ChatTemplate:
        """From chat_template.jinja, else from tokenizer_config.json; ConfigError if neither has one."""
        settings = read_json_file(model_dir / "tokenizer_config.json")
        special = {name: _token_text(settings.get(name)) for name in _SPECIAL_TOKEN_NAMES}
        known = {name: text for name, text in special.items() if text}
        file = model_dir / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), known, str(file))
        template = settings.get("chat_template")
        if isinstance(template, list):
            by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = by_name.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"the model directory {model_dir} has no chat template: neither chat_template.jinja nor a "
                "chat_template in tokenizer_config.json. Use an instruction-tuned model, or put a "
                "chat_template.jinja there"
            )
        return cls(template, known, f"{model_dir / 'tokenizer_config.json'} (chat_template)")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **self.settings,
            )
        except Exception as error:  # a template is a program: whatever it raises is its own refusal
            roles = ", ".join(message["role"] for message in messages)
            line = f", line {number}," if (number := _line_of(error)) else ""
            of_its_own = isinstance(error, UndefinedError)  # not what raise_exception says of the messages
            told = f"is wrong (with the roles {roles})" if of_its_own else f"refuses the roles ({roles})"
            raise TemplateRefusal(f"the chat template {self.origin}{line} {told}: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model generates, for those who train on rendered text; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _line_of(error: Exception) -> int:
    """The template's line that raised; jinja2 gives its frames the template's lines. 0 if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == "<template>"), 0)


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
