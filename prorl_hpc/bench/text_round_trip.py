"""What becomes of a rollout's tokens where conversations are kept as text: decoded turn by turn, rendered by the model's
template, encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from tokenizers import Tokenizer

from prorl_hpc.agents.chat_template import ChatTemplate
from prorl_hpc.messages.trajectory import Message


class TextRoundTrip:
    """The tokenizer and the template of a model directory, used as a chat server uses them."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._template = ChatTemplate.open(model_dir)

    def ids(self, messages: Sequence[Message], turns: Sequence[Sequence[int]]) -> list[int]:
        """Of the conversation up to the end of its last turn's text. ``turns``: the ids of the assistant's messages, whose
        text takes the place of what ``messages`` says."""
        texts = iter([self._tokenizer.decode(list(turn), skip_special_tokens=True) for turn in turns])
        written = [
            {"role": message.role, "content": next(texts) if message.role == "assistant" else message.content}
            for message in messages
        ]
        whole = self._template.render(written[:-1], add_generation_prompt=True) + written[-1]["content"]
        return list(self._tokenizer.encode(whole, add_special_tokens=False).ids)


def changed_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens have no counterpart in the other, by the longest runs that both have in common; of the longer rest."""
    begin = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    rest, other = ours[begin:], theirs[begin:]
    blocks = SequenceMatcher(None, rest, other, autojunk=False).get_matching_blocks()
    return max(len(rest), len(other)) - sum(block.size for block in blocks)
