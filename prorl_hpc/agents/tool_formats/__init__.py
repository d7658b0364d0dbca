"""The ways in which models write tool calls, by the names of ``model.tool_format``; and plain-text forms for small models."""

from __future__ import annotations

import difflib

from prorl_hpc.agents.tool_formats.bash_block import BashBlock
from prorl_hpc.agents.tool_formats.deepseek import DeepSeek
from prorl_hpc.agents.tool_formats.harmony import Harmony
from prorl_hpc.agents.tool_formats.hermes import Hermes
from prorl_hpc.agents.tool_formats.llama_json import LlamaJson
from prorl_hpc.agents.tool_formats.mistral import Mistral
from prorl_hpc.agents.tool_formats.openai_json import OpenAIJson
from prorl_hpc.agents.tool_formats.pythonic import Pythonic
from prorl_hpc.agents.tool_formats.qwen_xml import QwenXml
from prorl_hpc.agents.tool_formats.text import TextFormat, cut_middle, fence_format, tag_format
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.messages.errors import ConfigError

_ALL: tuple[ToolFormat, ...] = (
    Hermes(),
    QwenXml(),
    LlamaJson(),
    Pythonic(),
    Mistral(),
    DeepSeek(),
    Harmony(),
    BashBlock(),
    OpenAIJson(),
)
TOOL_FORMATS: dict[str, ToolFormat] = {tool_format.name: tool_format for tool_format in _ALL}


def get_tool_format(name: str) -> ToolFormat:
    """ConfigError with the nearest names if there is no such format."""
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    near = difflib.get_close_matches(name, TOOL_FORMATS, n=2, cutoff=0.5)
    suggestion = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"model.tool_format={name} is no known format: {suggestion}There are {', '.join(TOOL_FORMATS)}")


__all__ = ["TOOL_FORMATS", "TextFormat", "cut_middle", "fence_format", "get_tool_format", "tag_format"]
