"""How a model writes a chat as token ids, so that it can be extended message by message.

A conversation's ids are: the first prompt, then for each turn the ids that the engine returned, the template's *glue* (end
of turn, start of the next), the new messages, and the opening of the assistant's next turn. ``ChatFormat.open`` proves on
samples (chat_check) that this is how the template writes conversations, or refuses the model. Where a template rewrites
what is over (Qwen3 drops earlier thought, Mistral moves the system message), what was generated stays as it was.

Text of messages is encoded with control tokens disabled: a tool that prints ``<|im_end|>`` does not end a turn. Only the
template's own pieces become control tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from prorl_hpc.agents.chat_check import check_template
from prorl_hpc.agents.chat_dialect import Dialect, Probe
from prorl_hpc.agents.chat_template import ChatTemplate, read_json_file
from prorl_hpc.agents.chat_thinking import set_thinking
from prorl_hpc.agents.chat_tokens import ChatTokens, load_tokenizer
from prorl_hpc.config.model_directory import vocab_size_of
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message, ToolSchema


class ChatFormat:
    """Tokenizer and chat template of one model directory. Immutable, shared by all conversations."""

    def __init__(
        self, tokens: ChatTokens, template: ChatTemplate, dialect: Dialect, extra_eos_ids: Iterable[int], name: str
    ) -> None:
        """``name``: the model, for messages. Raises ConfigError if the template cannot be extended."""
        self.name = name
        self.dialect = dialect
        """What the template can write."""
        self._tokens = tokens
        self._writer = check_template(template, dialect, tokens, name)
        ends = self._writer.ends
        self.end_of_turn_id = tokens.control[ends.final][0]
        """With which the model ends an answer."""
        # Llama 3 ends a turn by another token when it calls a tool of its own.
        self._turn_end_ids = {tokens.control[end][0] for end in (*ends.tokens, "<|eom_id|>") if end in tokens.control}
        stops = {tokens.control[end][0] for end in (ends.final, ends.call, template.eos_token) if end in tokens.control}
        self.stop_token_ids: list[int] = sorted({*stops, *extra_eos_ids})
        """Ids that end an assistant's turn: those of the template, and the model's eos."""

    @classmethod
    def open(cls, model_dir: Path | str, *, thinking: str = "auto", tool_format: str = "auto") -> ChatFormat:
        """Load from a Hugging Face directory; ConfigError says what is missing or which part breaks. ``thinking``: auto,
        on or off, as model.thinking. ``tool_format``: as model.tool_format."""
        model_dir = Path(model_dir)
        if not model_dir.is_dir():
            raise ConfigError(f"model.path={model_dir} is not a directory: give a Hugging Face model directory")
        tokenizer = load_tokenizer(model_dir)
        template = ChatTemplate.open(model_dir)
        set_thinking(template, thinking, str(model_dir))
        dialect = Probe(template).dialect(tool_format)
        chat = cls(ChatTokens(tokenizer, template.source), template, dialect, _eos_ids(model_dir), str(model_dir))
        chat._check_vocabulary(
            tokenizer.get_vocab_size(with_added_tokens=False), vocab_size_of(read_json_file(model_dir / "config.json"))
        )
        return chat

    @property
    def tool_format(self) -> str:
        """In which the model writes calls: a name of agents.tool_formats."""
        return self.dialect.tool_format

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """The conversation's first ids: all messages, then the assistant's turn opened. ``tools`` are told of as the
        template does it, or in the system message if it does not. ConfigError if the template refuses the messages."""
        return self._tokens.encode(self._writer.prompt(messages, tools), at_start=True)

    def extension(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """The ids from the end of an assistant turn to the opening of the next: what closes the turn (all of
        it unless ``last_id``, the turn's last id, already ends it), ``messages``, the opening."""
        ids = self._tokens.encode(self._writer.after_turn(messages), at_start=False)
        ended = {ids[0]} if self._writer.ends.begin_next else self._turn_end_ids
        return ids[1:] if last_id in ended else ids

    def decode(self, ids: Sequence[int], *, control_tokens: bool = False) -> str:
        """Text of ``ids``; without the special tokens unless asked for."""
        return self._tokens.decode(ids, control_tokens=control_tokens)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text: what looks like a control token stays text."""
        return self._tokens.encode_text(text)

    def _check_vocabulary(self, own: int, of_model: int | None) -> None:
        """The tokens that chats are made of must be the model's. Added ones that the template does not write may be more
        than it has: some tokenizers are shared with larger models."""
        if of_model is None:
            return
        written = [*self.first_prompt([Message("user", "Word")]), *self.stop_token_ids]
        if (largest := max(own - 1, *written)) >= of_model:
            raise ConfigError(
                f"the tokenizer of {self.name} writes token ids up to {largest}, its config.json has vocab_size {of_model}: "
                "they do not belong together. Use the tokenizer that the model was trained with"
            )


def _eos_ids(model_dir: Path) -> list[int]:
    """eos ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json_file(model_dir / name).get("eos_token_id")
        if isinstance(eos, int):
            return [eos]
        if isinstance(eos, list) and all(isinstance(i, int) for i in eos):
            return list(eos)
    return []
