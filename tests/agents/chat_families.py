"""Model directories with real chat templates: a small byte-level BPE with the family's own control tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
_CORPUS = [
    "system user assistant tool model function name arguments parameters type object string Word is here question answer "
    'The number of a.txt {"name": "look", "arguments": {"argument": "x"}} \n\n 0123456789 ```json'
]


@dataclass(frozen=True)
class FamilyTokens:
    """``plain`` are added tokens that the family's tokenizer does not call special."""

    special: tuple[str, ...]
    eos: str
    bos: str = ""
    plain: tuple[str, ...] = ()
    more_eos: tuple[str, ...] = field(default=())


_QWEN2_5 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
_QWEN_TOOL = ("<tool_call>", "</tool_call>")
_QWEN3_PLAIN = (*_QWEN_TOOL, "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA3 = tuple(
    f"<|{name}|>"
    for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag")
)
_MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
_MISTRAL += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]")
_MISTRAL += ("[CALL_ID]", "[IMG]")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_DEEPSEEK_PLAIN = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
_DEEPSEEK_PLAIN += ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_PLAIN += ("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
_DEEPSEEK_PLAIN += ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>")
_HARMONY += ("<|start|>", "<|end|>", "<|message|>", "<|call|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_CHATML = FamilyTokens(_QWEN2_5[:3], "<|im_end|>")
_LLAMA = FamilyTokens(_LLAMA3, "<|eot_id|>", "<|begin_of_text|>", (), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"))
_DEEPSEEKS = FamilyTokens(_DEEPSEEK, _DEEPSEEK[1], _DEEPSEEK[0], _DEEPSEEK_PLAIN)
_GEMMAS = FamilyTokens(_GEMMA, "<eos>", "<bos>", ("\n\n", "<table>", "<h1>"), ("<eos>", "<end_of_turn>"))
_LFM2 = ("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>")
_LFM2 += ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>")

FAMILIES = {
    "qwen2_5": FamilyTokens(_QWEN2_5, "<|im_end|>", "", _QWEN_TOOL, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": FamilyTokens(_QWEN2_5, "<|im_end|>", "", _QWEN3_PLAIN, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_instruct_2507": FamilyTokens(_QWEN2_5, "<|im_end|>", "", _QWEN3_PLAIN, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_coder": FamilyTokens(_QWEN2_5, "<|im_end|>", "", _QWEN3_PLAIN, ("<|im_end|>", "<|endoftext|>")),
    "llama3": _LLAMA,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "mistral_nemo": FamilyTokens(_MISTRAL, "</s>", "<s>"),
    "mistral_small_3_2": FamilyTokens(_MISTRAL, "</s>", "<s>"),
    "gemma2": _GEMMAS,
    "gemma3": _GEMMAS,
    "smollm2": _CHATML,
    "smollm3": FamilyTokens(_QWEN2_5[:3], "<|im_end|>", "", _QWEN3_PLAIN),
    "deepseek_v3": _DEEPSEEKS,
    "deepseek_v3_1": _DEEPSEEKS,
    "deepseek_r1_distill": _DEEPSEEKS,
    "gpt_oss": FamilyTokens(_HARMONY, "<|return|>", "<|startoftext|>", (), ("<|return|>", "<|endoftext|>", "<|call|>")),
    "granite_3_3": FamilyTokens(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), "<|end_of_text|>"
    ),
    "phi3_5": FamilyTokens(
        ("<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"), "<|endoftext|>"
    ),
    "lfm2": FamilyTokens(_LFM2, "<|im_end|>", "<|startoftext|>"),
}


def write_family(directory: Path, family: str | FamilyTokens, template: str = "", *, metaspace: bool = False) -> Path:
    """A model directory (no weights) with the family's template, or another one, and its control tokens. ``metaspace``:
    split as SentencePiece does, which writes a space before the first word of a text."""
    tokens = FAMILIES[family] if isinstance(family, str) else family
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(tokens.special),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in tokens.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens.plain])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": tokens.eos, **({"bos_token": tokens.bos} if tokens.bos else {})}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    eos = [tokenizer.token_to_id(text) for text in tokens.more_eos or (tokens.eos,)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    else:
        shutil.copy(TEMPLATES / f"{family}.jinja", directory / "chat_template.jinja")
    return directory
