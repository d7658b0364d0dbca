"""How each family thinks, and in which form it calls tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_families import write_family
from family_chats import (
    RESULTS,
    TOOLS,
    USER,
    rendered,
    text_of,
)

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message, ToolCall

# thinking

THINKS = {"qwen3": ("enable_thinking", True), "smollm3": ("enable_thinking", True), "deepseek_v3_1": ("thinking", True)}


@pytest.mark.parametrize("family", THINKS)
def test_thinking_is_set_by_the_templates_own_switch(opened: Any, directory: Path, family: str) -> None:
    name, _ = THINKS[family]
    for thinking in ("on", "off"):
        chat = opened(family, thinking=thinking)
        text, ids = rendered(directory, family, [USER], **{name: thinking == "on"})
        assert chat.first_prompt([USER]) == ids, text
        follow = text_of(chat, chat.extension([USER], None))
        assert follow.endswith(text[text.index("is in a.txt?") + 12 :][-10:])


def test_gpt_oss_thinks_harder_when_asked(opened: Any) -> None:
    assert "Reasoning: high" in text_of(
        opened("gpt_oss", thinking="on"), opened("gpt_oss", thinking="on").first_prompt([USER])
    )
    assert "Reasoning: medium" in text_of(opened("gpt_oss"), opened("gpt_oss").first_prompt([USER]))


@pytest.mark.parametrize(
    ("family", "thinking", "message"),
    [
        ("qwen2_5", "on", "thinking=on.*knows no thought"),
        ("deepseek_r1_distill", "off", "thinking=off.*always thinks"),
        ("gpt_oss", "off", "thinking=off.*always thinks"),
        ("qwen3", "maybe", "thinking=maybe is not allowed: use auto, on, off"),
    ],
)
def test_thinking_that_a_model_cannot_do_is_refused(opened: Any, family: str, thinking: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(family, thinking=thinking)


@pytest.mark.parametrize(("family", "thinking"), [("qwen2_5", "off"), ("deepseek_r1_distill", "on"), ("gemma2", "off")])
def test_thinking_that_a_model_does_anyway_is_allowed(opened: Any, family: str, thinking: str) -> None:
    assert opened(family, thinking=thinking).first_prompt([USER]) == opened(family).first_prompt([USER])


def test_earlier_thought_that_the_template_drops_stays_in_our_conversation(opened: Any, directory: Path) -> None:
    chat = opened("qwen3")
    turn = "<think>\nHm.\n</think>\n\nA number."
    ids = chat.first_prompt([USER]) + chat._tokens.encode_whole(turn + "<|im_end|>")
    ids += chat.extension([Message("user", "Sure?")], chat.end_of_turn_id)
    kept = text_of(chat, ids)
    dropped, _ = rendered(directory, "qwen3", [USER, Message("assistant", turn), Message("user", "Sure?")])
    assert kept.replace("<think>\nHm.\n</think>\n\n", "") == dropped != kept


def test_thought_of_a_history_is_written_where_the_template_does(opened: Any) -> None:
    call = ToolCall("bash", {"path": "a"}, "abcdef124")
    turn = Message("assistant", "", tool_calls=[call], reasoning="Look first <|im_end|>.")
    text = text_of(opened("qwen3"), opened("qwen3").first_prompt([USER, turn, RESULTS[1]], TOOLS))
    assert "<think>\nLook first <|im_end|>.\n</think>\n\n<tool_call>" in text
    harmony = text_of(opened("gpt_oss"), opened("gpt_oss").first_prompt([USER, turn, RESULTS[1]], TOOLS))
    assert "<|channel|>analysis<|message|>Look first <|im_end|>.<|end|><|start|>assistant to=functions.bash" in harmony


# tool formats

FORMATS = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "smollm2", "smollm3", "gemma2", "gemma3"), "hermes"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama_json"),
    **dict.fromkeys(("mistral_nemo", "mistral_small_3_2"), "mistral"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_1", "deepseek_r1_distill"), "deepseek"),
    **{"qwen3_coder": "qwen_xml", "gpt_oss": "harmony", "granite_3_3": "json", "lfm2": "pythonic"},
}


@pytest.mark.parametrize(("family", "expected"), FORMATS.items())
def test_the_tool_format_is_known_from_the_template(opened: Any, family: str, expected: str) -> None:
    assert opened(family).tool_format == expected


def test_another_tool_format_is_told_of_in_the_system_message(opened: Any) -> None:
    chat = opened("qwen2_5", tool_format="bash_block")
    assert chat.tool_format == "bash_block"
    text = text_of(chat, chat.first_prompt([USER], TOOLS))
    assert "```bash\nls\n```" in text and "<tools>" not in text
    assert "<|im_start|>user\n<tool_response>\nfirst output" in text_of(chat, chat.extension(RESULTS[:1], None))
    with pytest.raises(ConfigError, match="tool_format=bash is no known format"):
        opened("qwen2_5", tool_format="bash")


def test_a_template_whose_calls_nobody_knows_is_told_hermes(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = (Path(__file__).parent / "templates" / "qwen2_5.jinja").read_text()
    template = source.replace("<tool_call>", "<doit>").replace("</tool_call>", "</doit>")
    chat = ChatFormat.open(write_family(directory / "unknown", "qwen2_5", template))
    assert chat.tool_format == "hermes" and "teaches tool calls in a form that is not known" in caplog.text
    assert "<doit>" not in text_of(chat, chat.first_prompt([USER], TOOLS))
