"""Text stays text in every family's template; conversations only grow; what public reports tell of."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, FamilyTokens, write_family
from family_chats import (
    HOSTILE,
    RESULTS,
    SYSTEM,
    TOOLS,
    USER,
    controls,
    id_of,
    rendered,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_text_adds_no_control_token(opened: Any, family: str) -> None:
    chat = opened(family)

    def prompt(text: str) -> list[int]:
        properties = {text: {"type": "string", "description": text, "enum": [text], "default": text}}
        schema = {"type": "object", "properties": properties, "required": [text]}
        return chat.first_prompt([Message("user", text)], [ToolSchema(f"f{text}", text, schema)])

    def extension(text: str) -> list[int]:
        return chat.extension([Message("tool", text, text, text), Message("tool", text, text, text)], None)

    for write in (prompt, extension):
        assert controls(chat, write(HOSTILE)) == controls(chat, write("plain"))
    assert HOSTILE in text_of(chat, chat.extension([Message("user", HOSTILE)], None))


@pytest.mark.parametrize("family", ["mistral_nemo", "mistral_small_3_2"])
def test_mistrals_call_ids_have_nine_characters(opened: Any, family: str) -> None:
    chat = opened(family)
    for call_id in ("", "call_0123456789abcdef"):
        call = ToolCall("bash", {}, call_id)
        messages = [USER, Message("assistant", "", tool_calls=[call]), Message("tool", "out", "bash", call_id)]
        text = text_of(chat, chat.first_prompt(messages, TOOLS))
        assert re.search(r"\b[0-9a-f]{9}\b", text)
        assert re.search(r"\b[0-9a-f]{9}\b", text_of(chat, chat.extension(messages[2:], None)))
    made, kept = (
        re.findall(r"\b[0-9a-z]{9}\b", text_of(chat, chat.first_prompt([USER, turn, result], TOOLS)))
        for turn, result in (
            (Message("assistant", "", tool_calls=[ToolCall("bash", {}, i)]), Message("tool", "out", "bash", i))
            for i in ("call_long_id", "abcdef123")
        )
    )
    assert kept[-1] == kept[-2] == "abcdef123" and made[-1] == made[-2]


def test_mistrals_equal_questions_have_the_tools_once(opened: Any) -> None:
    messages = [USER, Message("assistant", "It."), USER]
    for family in ("mistral_nemo", "mistral_small_3_2"):
        text = text_of(opened(family), opened(family).first_prompt(messages, TOOLS))
        assert text.count("[AVAILABLE_TOOLS]") == 1


def test_gemma_has_its_system_message_in_the_first_question(opened: Any) -> None:
    text = text_of(opened("gemma2"), opened("gemma2").first_prompt([SYSTEM, USER]))
    assert text == ("<bos><start_of_turn>user\nBe brief.\n\nWhat is in a.txt?<end_of_turn>\n<start_of_turn>model\n")


def test_several_questions_in_a_row_are_one_where_roles_alternate(opened: Any) -> None:
    for family in ("gemma2", "gemma3", "mistral_nemo"):
        text = text_of(opened(family), opened(family).extension([USER, Message("user", "Quick!")], None))
        assert "What is in a.txt?\n\nQuick!" in text


def test_the_day_in_prompts_does_not_change_while_a_run_lasts(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama3_2", "gpt_oss", "mistral_small_3_2"):
        chat = opened(family)
        before = chat.first_prompt([USER])
        monkeypatch.setattr("time.localtime", lambda *_: pytest.fail("the clock was read"))
        assert chat.first_prompt([USER]) == before
        monkeypatch.undo()


def test_a_schema_keeps_what_templates_look_at(opened: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["a", "b"]},
            "many": {"type": "array", "items": {"type": "string"}},
            "either": {"type": ["string", "null"]},
        },
        "required": ["type"],
    }
    text = text_of(opened("gpt_oss"), opened("gpt_oss").first_prompt([USER], [ToolSchema("f", "does", schema)]))
    assert 'type: "a" | "b",\nmany?: string[],\neither?: string | null,\n' in text


def test_an_unknown_role_is_an_error_and_developer_is_the_system(opened: Any) -> None:
    chat = opened("qwen2_5")
    with pytest.raises(ValueError, match="role 'wizard': there are system, developer, user, assistant, tool"):
        chat.first_prompt([Message("wizard", "x")])
    assert chat.first_prompt([Message("developer", "s"), USER]) == chat.first_prompt([Message("system", "s"), USER])


NEXT_ROLE_ENDS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
).replace("'<|' + m.role", "'<|' + ('observation' if m.role == 'tool' else m.role)")


def test_a_turn_that_ends_by_the_next_messages_token(directory: Path) -> None:
    names = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
    model = write_family(directory / "next", FamilyTokens(names, "<|endoftext|>"), NEXT_ROLE_ENDS)
    chat = ChatFormat.open(model)
    user, observation = id_of(chat, "<|user|>"), id_of(chat, "<|observation|>")
    assert {user, observation} <= set(chat.stop_token_ids)
    question, result = [Message("user", "q")], RESULTS[:1]
    assert text_of(chat, chat.extension(question, None)) == "<|user|>\nq<|assistant|>\n"
    assert text_of(chat, chat.extension(question, user)) == "\nq<|assistant|>\n"
    # A call that nobody could read is answered by the user, after the token that begins a result.
    assert text_of(chat, chat.extension(question, observation)) == "<|user|>\nq<|assistant|>\n"
    assert text_of(chat, chat.extension(result, observation)) == "\nfirst output<|assistant|>\n"


@pytest.mark.parametrize("family", ["mistral_nemo", "gemma3"])
def test_a_tokenizer_that_writes_the_first_word_otherwise(directory: Path, family: str) -> None:
    model = write_family(directory / f"metaspace-{family}", family, metaspace=True)
    chat = ChatFormat.open(model)
    for messages in ([USER], [Message("user", " \n x  y "), Message("assistant", "It."), USER]):
        text, ids = rendered(directory, f"metaspace-{family}", messages)
        assert chat.first_prompt(messages) == ids, text
    assert controls(chat, chat.extension([Message("user", HOSTILE)], None)) == controls(
        chat, chat.extension([Message("user", "x")], None)
    )


BREAKS_WITH_TOOLS = {
    "forgets": (
        "<tool_response>\\n' }}",
        "<tool_response>\\n' + (messages | length | string) }}",
        "goes on differently",
    ),
    "rewrites": (
        "'<|im_start|>' + message.role }}",
        "'<|im_start|>' + message.role + ('' if loop.last else '!') }}",
        r"adding message 4 \(tool\) changes what it wrote before it .*!",
    ),
}


@pytest.mark.parametrize("case", BREAKS_WITH_TOOLS)
def test_a_template_that_breaks_with_tools_alone_is_refused_by_that_part(directory: Path, case: str) -> None:
    source = (Path(__file__).parent / "templates" / "qwen2_5.jinja").read_text()
    old, new, message = BREAKS_WITH_TOOLS[case]
    assert old in source
    with pytest.raises(ConfigError, match=f"cannot be extended message by message with tools: .*{message}"):
        ChatFormat.open(write_family(directory / case, "qwen2_5", source.replace(old, new)))


def test_a_real_small_model_is_told_of_tools() -> None:
    model = prepared_model("smollm2-135m")
    if not model.is_dir():
        pytest.skip(f"{model} is not there: python -m prorl_hpc model prepare smollm2-135m")
    chat = ChatFormat.open(model)
    text = text_of(chat, chat.first_prompt([SYSTEM, USER], TOOLS))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and '{"name": "read_file"' in text
    assert "<|im_start|>user\n<tool_response>\nfirst output\n</tool_response><|im_end|>" in text_of(
        chat, chat.extension(RESULTS, chat.end_of_turn_id)
    )
    assert controls(chat, chat.extension([Message("user", HOSTILE)], None)) == 4


# properties

contents = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\n\n x \t", HOSTILE, '{"a": "\\n"}', "\ue0000000000\ue001"]
)
LOSSLESS = [
    "qwen2_5",
    "qwen3_instruct_2507",
    "llama3_1",
    "mistral_small_3_2",
    "lfm2",
    "smollm2",
    "granite_3_3",
    "phi3_5",
]
"""Their templates write all of a plain conversation, whatever follows."""


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("family", LOSSLESS)
def test_decoded_ids_are_the_rendered_conversation(
    opened: Any, directory: Path, family: str, data: st.DataObject
) -> None:
    chat = opened(family)
    trimmed = family == "llama3_1"
    messages = [Message("system", "s")]
    questions = data.draw(st.lists(contents.filter(str.strip), min_size=1, max_size=4))
    ids: list[int] = []
    for question in questions:
        new = [Message("user", question)]
        ids += chat.extension(new, ids[-1]) if ids else chat.first_prompt([*messages, *new])
        answer = data.draw(contents.filter(lambda text: text and (not trimmed or text == text.strip())))
        ids += [*chat.encode_text(answer), chat.end_of_turn_id]
        messages += [*new, Message("assistant", answer)]
    last = Message("user", "The end?")
    ids += chat.extension([last], ids[-1])
    text, _ = rendered(directory, family, [*messages, last])
    assert text_of(chat, ids) == text


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_only_grow_and_hold_what_was_written(
    opened: Any, family: str, rng: random.Random, data: st.DataObject
) -> None:
    chat = opened(family)
    ids = chat.first_prompt([SYSTEM, USER], TOOLS if rng.random() < 0.5 else ())
    for _ in range(rng.randrange(1, 5)):
        before = list(ids)
        turn = chat.encode_text(data.draw(contents))
        end = rng.choice([[], [chat.end_of_turn_id], [rng.choice(chat.stop_token_ids)]])
        ids += turn + end
        said = data.draw(st.lists(contents, min_size=1, max_size=3))
        tools = rng.random() < 0.5
        new = [Message("tool" if tools else "user", text, "f", str(i)) for i, text in enumerate(said)]
        ids += chat.extension(new, ids[-1])
        assert ids[: len(before)] == before
        assert ids[len(before) : len(before) + len(turn)] == turn
        shown = text_of(chat, ids[len(before) :])
        for text in said:
            assert text.strip() in shown or json.dumps(text.strip(), ensure_ascii=False)[1:-1] in shown


@settings(max_examples=25, deadline=None)
@given(contents, contents)
@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "mistral_nemo", "gemma3", "gpt_oss", "deepseek_v3"])
def test_any_text_of_a_schema_or_result_adds_no_control_token(opened: Any, family: str, one: str, other: str) -> None:
    chat = opened(family)
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": one}}, "required": ["a"]}

    def ids(first: str, second: str) -> list[int]:
        prompt = chat.first_prompt([USER], [ToolSchema("f", first or "x", schema)])
        return prompt + chat.extension([Message("tool", second, "f", "1"), Message("tool", first, "f", "2")], None)

    assert controls(chat, ids(one, other)) == controls(chat, ids("plain", "text"))
