"""Fakes to test a task, or the agent loop, without a model and without a sandbox.

chat = ChatFormat.open(write_chat_model(tmp_path))
llm = ScriptedLLM(chat, ["<bash>cat a.txt</bash>", "answer: 7"])
evaluation, conversation = await play(handler, row, FakeSandbox(), chat, llm)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.sandbox.protocol import Sandbox
from prorl_hpc.tasks.protocol import AgentHandler, Evaluation, RolloutContext, wants_fresh_sandbox

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "system user assistant bash answer: output: number cat head tail the file is here\n\n  1234567890 <bash></bash>"
]


def write_chat_model(directory: Path, template: str = CHATML) -> Path:
    """A directory with the tokenizer and chat template of a model (no weights): byte-level BPE, ChatML tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # save() has no OSError
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return directory


Turn = str | Completion | Exception


class ScriptedLLM:
    """An LLM that plays ``turns``: a text ends with the end of turn, an exception is raised. A callable is
    asked for each turn with the prompt as text. ``calls`` records (prompt ids, sampling)."""

    def __init__(self, chat: ChatFormat, turns: Sequence[Turn] | Callable[[str], Turn], version: int = 1) -> None:
        self._chat = chat
        self._turns = turns
        self._version = version
        self.calls: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.calls.append((list(token_ids), sampling))
        await asyncio.sleep(0)
        turns = self._turns
        turn = (
            turns(self._chat.decode(token_ids, control_tokens=True)) if callable(turns) else turns[len(self.calls) - 1]
        )
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, Completion):
            return turn
        ids = [*self._chat.encode_text(turn), self._chat.end_of_turn_id]
        finish = FinishReason.STOP
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], FinishReason.LENGTH
        return Completion(ids, [-0.5] * len(ids), finish, [VersionSpan(self._version, 0, len(ids))])


async def play(
    handler: AgentHandler,
    row: Mapping[str, Any],
    sandbox: Sandbox,
    chat: ChatFormat,
    llm: ScriptedLLM,
    max_context_tokens: int = 4096,
    eval_sandbox: Sandbox | None = None,
) -> tuple[Evaluation, TokenConversation]:
    """All three stages of one rollout, one after the other. A task that is scored in a fresh sandbox needs
    ``eval_sandbox``, or ValueError."""
    if wants_fresh_sandbox(handler, row) and eval_sandbox is None:
        raise ValueError("the task is scored in a fresh sandbox (eval_in_fresh_sandbox): give eval_sandbox as well")
    handler.check_row(row)
    spec = RolloutSpec("rollout-0", "task", dict(row))
    conversation = TokenConversation(
        chat, llm, spec.sampling, max_context_tokens=max_context_tokens, max_turn_tokens=256
    )
    context = RolloutContext(spec, sandbox)
    await handler.init(context)
    context.conversation = conversation
    await handler.run(context)
    if wants_fresh_sandbox(handler, row) and eval_sandbox is not None:
        context.sandbox = eval_sandbox
    return await handler.eval(context), conversation
