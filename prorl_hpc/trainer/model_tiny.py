"""``tiny``: a real model for tests, made from nothing in under a minute on two cores.

Two layers of Qwen3 with 130 thousand parameters, its own byte-level BPE tokenizer with a ChatML template, and a
supervised warm start on file_quest that leaves it right about four times in ten: it knows how to ask the tool and how to read
the answer, but not yet which command a question wants. So a few steps of reinforcement learning have something
to raise. It has seen the words of the held-out split: runs with it test the machinery, they prove no generalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.tasks.file_quest_words import FILES, QUESTIONS, WORDS

PAD_TOKEN, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_POSITIONS = 2048


def make_tiny(target: Path, progress: Callable[[str], None]) -> None:
    """Fill ``target``."""
    import torch

    from prorl_hpc.trainer.model_warm_start import warm_start

    progress("making the tokenizer and a random model")
    vocabulary = save_tokenizer(target)
    threads = torch.get_num_threads()
    # More threads would only wait for each other in operations as small as these.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = random_model(vocabulary)
            model.config.save_pretrained(target)  # which ChatFormat reads
            warm_start(model, ChatFormat.open(target), progress)
        model.save_pretrained(target)
    finally:
        torch.set_num_threads(threads)


def save_tokenizer(target: Path) -> int:
    """Train the tokenizer on the words of the task and save it; returns the exact size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # Digits one by one: a number is copied digit by digit, whatever number it is.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than it finds: every word of the corpus becomes one token
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=PAD_TOKEN, model_max_length=MAX_POSITIONS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    return len(tokenizer)


def random_model(vocabulary: int) -> Any:
    """A random Qwen3. ``vocabulary`` is exact: an engine would sample padded ids, which have no text."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    pad, _, end = range(3)  # the places of the special tokens above
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,  # 0.02, made for wide models, learns several times slower at this width
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def _corpus() -> Iterator[str]:
    for split in ("train", "heldout"):
        for name in (*WORDS[split], *FILES[split]):
            yield f"{name} {name}.txt"
        for questions in QUESTIONS[split].values():
            yield from (question.format(file="notes.txt") for question in questions)
    for message in FileQuest(TaskConfig()).worked_examples():
        yield f"{message.role}\n{message.content}"
