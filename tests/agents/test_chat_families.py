"""Real chat templates: each family's conversations as ids, against transformers' own rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from family_chats import (
    NATIVE_TOOLS,
    RESULTS,
    SYSTEM,
    TOLD_OF_TOOLS,
    TOOLS,
    USER,
    id_of,
    rendered,
    text_of,
)

from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.messages.trajectory import Message, ToolCall


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_transformers_writes(opened: Any, directory: Path, family: str) -> None:
    chat = opened(family)
    conversations = [[USER], [Message("user", "  é✓ 12\n\n x ")], [USER, Message("assistant", "A number."), USER]]
    if chat.dialect.system:
        conversations += [[SYSTEM, USER], [SYSTEM, USER, Message("assistant", "It."), Message("user", "Sure?")]]
    for messages in conversations:
        text, ids = rendered(directory, family, messages)
        assert text_of(chat, chat.first_prompt(messages)) == text
        assert chat.first_prompt(messages) == ids


@pytest.mark.parametrize("family", NATIVE_TOOLS)
def test_tools_are_told_of_as_the_template_does(opened: Any, directory: Path, family: str) -> None:
    chat = opened(family)
    for messages in ([USER], [SYSTEM, USER]):
        text, ids = rendered(directory, family, messages, TOOLS)
        assert text_of(chat, chat.first_prompt(messages, TOOLS)) == text
        assert chat.first_prompt(messages, TOOLS) == ids


@pytest.mark.parametrize("family", [name for name in NATIVE_TOOLS if name != "granite_3_3"])
def test_a_history_with_calls_and_results_is_written_as_the_template_does(
    opened: Any, directory: Path, family: str
) -> None:
    chat = opened(family)
    call = ToolCall("read_file", {"path": "a.txt", "lines": 3}, "abcdef123")
    messages = [USER, Message("assistant", "", tool_calls=[call]), RESULTS[0]]
    text, ids = rendered(directory, family, messages, TOOLS)
    assert text_of(chat, chat.first_prompt(messages, TOOLS)) == text
    assert chat.first_prompt(messages, TOOLS) == ids


@pytest.mark.parametrize("family", TOLD_OF_TOOLS)
def test_a_template_without_tools_has_them_in_the_system_message(opened: Any, family: str) -> None:
    chat = opened(family)
    with_system = text_of(chat, chat.first_prompt([SYSTEM, USER], TOOLS))
    assert with_system.count("Be brief.") == 1 and with_system.index("Be brief.") < with_system.index('"read_file"')
    alone = text_of(chat, chat.first_prompt([USER], TOOLS))
    assert alone.index('"read_file"') < alone.index(USER.content)
    example = "<tool_call>\n" if chat.tool_format == "hermes" else get_tool_format(chat.tool_format).write(TOOL_CALL)
    assert example in alone


TOOL_CALL = ToolCall("bash", {"command": "ls"}, "000000000")


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_questions_follow_a_turn(opened: Any, family: str) -> None:
    chat = opened(family)
    end = chat.end_of_turn_id
    one, several = chat.extension(RESULTS[:1], end), chat.extension(RESULTS, end)
    both = text_of(chat, several)
    assert both.index("first output") < both.index("second output")
    assert text_of(chat, one).count("first output") == 1
    asked = text_of(chat, chat.extension([*RESULTS, Message("user", "Go on.")], end))
    assert asked.index("second output") < asked.index("Go on.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_turn_is_ended_and_an_ended_one_is_not_ended_again(opened: Any, family: str) -> None:
    chat = opened(family)
    for messages in ([USER], RESULTS[:1]):
        cut = chat.extension(messages, None)
        ended = chat.extension(messages, chat.end_of_turn_id)
        assert cut[1:] == ended


FOLLOW_UPS = {
    "qwen3": "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_nemo": "</s>[INST]q[/INST]",
    "mistral_small_3_2": "</s>[INST]q[/INST]",
    "gemma2": "<end_of_turn>\n<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>\n",
    "gpt_oss": "<|end|><|start|>user<|message|>q<|end|><|start|>assistant",
    "smollm2": "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
}
AFTER_CALLS = {
    "qwen3": "<|im_end|>\n<|im_start|>user\n<tool_response>\nfirst output\n</tool_response>\n<tool_response>\n"
    "second output\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"first output"<|eot_id|><|start_header_id|>'
    'ipython<|end_header_id|>\n\n"second output"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    "mistral_nemo": '</s>[TOOL_RESULTS]{"content": first output, "call_id": "abcdef123"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": second output, "call_id": "abcdef124"}[/TOOL_RESULTS]',
    "mistral_small_3_2": "</s>[TOOL_RESULTS]abcdef123[TOOL_CONTENT]first output[/TOOL_RESULTS]"
    "[TOOL_RESULTS]abcdef124[TOOL_CONTENT]second output[/TOOL_RESULTS]",
    "gemma2": "<end_of_turn>\n<start_of_turn>user\n<tool_response>\nfirst output\n</tool_response>\n\n<tool_response>\n"
    "second output\n</tool_response><end_of_turn>\n<start_of_turn>model\n",
    "deepseek_v3_1": "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>first output<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>second output<｜tool▁output▁end｜>",
    "gpt_oss": '<|call|><|start|>functions.read_file to=assistant<|channel|>commentary<|message|>"first output"<|end|>'
    '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"second output"<|end|><|start|>assistant',
}


@pytest.mark.parametrize(("family", "expected"), FOLLOW_UPS.items())
def test_what_follows_an_answer(opened: Any, family: str, expected: str) -> None:
    chat = opened(family)
    assert text_of(chat, chat.extension([Message("user", "q")], None)) == expected


@pytest.mark.parametrize(("family", "expected"), AFTER_CALLS.items())
def test_what_follows_calls(opened: Any, family: str, expected: str) -> None:
    chat = opened(family)
    assert text_of(chat, chat.extension(RESULTS, None)) == expected


def test_harmony_ends_turns_by_return_or_call_and_goes_on_after_end(opened: Any) -> None:
    chat = opened("gpt_oss")
    assert chat.end_of_turn_id == id_of(chat, "<|return|>")
    assert {id_of(chat, "<|return|>"), id_of(chat, "<|call|>")} <= set(chat.stop_token_ids)
    assert id_of(chat, "<|end|>") not in chat.stop_token_ids
    assert chat.extension(RESULTS, id_of(chat, "<|call|>")) == chat.extension(RESULTS, None)[1:]


def test_a_turn_that_llama_ends_with_its_other_end_is_not_ended_again(opened: Any) -> None:
    chat = opened("llama3_1")
    eom = id_of(chat, "<|eom_id|>")
    assert eom in chat.stop_token_ids
    assert chat.extension(RESULTS[:1], eom) == chat.extension(RESULTS[:1], None)[1:]
