"""model.thinking: how a template is told whether the model is to think before it answers."""

from __future__ import annotations

import re
from typing import Any

from prorl_hpc.agents.chat_template import ChatTemplate
from prorl_hpc.messages.errors import ConfigError

CHOICES = ("auto", "on", "off")
_THOUGHT = re.compile(
    r"<think>\s*(</think>\s*)?|</think>\s*"
    r"|<\|channel>thought\s*(<channel\|>\s*)?"
    r"|<\|START_THINKING\|>\s*(<\|END_THINKING\|>\s*)?"
)
_THINKS = re.compile(r"<think>|<\|channel\|>analysis|<\|channel>thought|<\|START_THINKING\|>|\[THINK\]")


def without_thought(text: str) -> str:
    """``text`` without the thoughts, opened or empty, that templates write before an answer and leave out later."""
    return _THOUGHT.sub("", text)


def set_thinking(template: ChatTemplate, thinking: str, model: str) -> None:
    """Make ``template`` think or not. ConfigError if ``thinking`` is not one of CHOICES, or the model cannot."""
    if thinking not in CHOICES:
        raise ConfigError(f"model.thinking={thinking} is not allowed: use {', '.join(CHOICES)}")
    if thinking == "auto":
        return
    switch = _switch(template, thinking)
    if switch is not None and _has_effect(template, switch):
        template.settings.update(switch)
        return
    thinks = bool(_THINKS.search(template.source))
    if thinking == "on" and not thinks:
        raise ConfigError(
            f"model.thinking=on, but the chat template of {model} knows no thought: use model.thinking=auto, or a "
            "model that reasons"
        )
    if thinking == "off" and thinks:
        raise ConfigError(
            f"model.thinking=off, but the chat template of {model} has no switch for it (enable_thinking, thinking, "
            "reasoning_effort with none): this model always thinks. Use model.thinking=auto or on"
        )


def _switch(template: ChatTemplate, thinking: str) -> dict[str, Any] | None:
    """The template's own variable and its value."""
    on = thinking == "on"
    for name in ("enable_thinking", "thinking"):
        if name in template.variables:
            return {name: on}
    if "reasoning_effort" in template.variables:
        if on:
            return {"reasoning_effort": "high"}
        if re.search(r"""['"]none['"]""", template.source):
            return {"reasoning_effort": "none"}
    return None


def _has_effect(template: ChatTemplate, switch: dict[str, Any]) -> bool:
    """Whether the switch, set to this or to the contrary, makes a difference."""
    sample = [{"role": "user", "content": "u"}]
    name, value = next(iter(switch.items()))
    contrary = {"high": "low", "none": "high"}.get(value, not value) if isinstance(value, str) else not value
    before = dict(template.settings)
    try:
        texts = []
        for setting in (value, contrary):
            template.settings[name] = setting
            texts.append(template.render(sample, add_generation_prompt=True))
    finally:
        template.settings.clear()
        template.settings.update(before)
    return texts[0] != texts[1]
