from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.tasks.file_quest_words import COMMANDS
from prorl_hpc.trainer.model_demonstrations import Demonstrations, run_command
from prorl_hpc.trainer.model_recipes import prepare
from prorl_hpc.trainer.model_tiny import random_model, save_tokenizer

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'prorl_hpc[train]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'prorl_hpc[train]'")
warm = pytest.importorskip("prorl_hpc.trainer.model_warm_start")

pytestmark = pytest.mark.train


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would only wait for each other at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model, on two layers as small as it is."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    random_model(save_tokenizer(path)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat(model_dir: Path) -> ChatFormat:
    return ChatFormat.open(model_dir)


@pytest.fixture
def model(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_vocabulary_is_exact_and_words_are_single_tokens(model_dir: Path, chat: ChatFormat) -> None:
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(model_dir).vocab_size == len(AutoTokenizer.from_pretrained(model_dir))
    assert len(chat.encode_text(" garden")) == len(chat.encode_text(" kiwi")) == 1
    assert len(chat.encode_text("5132")) == 4
    assert chat.decode(chat.encode_text("größer ✓")) == "größer ✓"


def test_demonstrations_are_real_rollouts(chat: ChatFormat) -> None:
    demonstration = Demonstrations(chat, 3).draw_right()
    text = chat.decode(demonstration.token_ids, control_tokens=True)
    written = [t for t, trained in zip(demonstration.token_ids, demonstration.trained, strict=True) if trained]
    call, answer, rest = chat.decode(written, control_tokens=True).split("<|im_end|>")
    assert call.startswith("<bash>") and answer.startswith("answer: ") and rest == ""
    assert text.endswith(answer + "<|im_end|>") and "<|im_start|>user\noutput: " in text


def test_demonstrations_repeat_by_seed_and_share_the_prefix(chat: ChatFormat) -> None:
    one, again = Demonstrations(chat, 5), Demonstrations(chat, 5)
    drawn = [one.draw(0.4, with_examples=True) for _ in range(20)]
    assert drawn == [again.draw(0.4, with_examples=True) for _ in range(20)]
    assert all(d.token_ids[: len(one.prefix)] == one.prefix for d in drawn)
    assert not any(any(d.trained[: len(one.prefix)]) for d in drawn)


@pytest.mark.parametrize("kind", sorted(COMMANDS))
def test_simulated_commands_print_what_the_shell_prints(kind: str, tmp_path: Path) -> None:
    content = "kiwi 1234\npear 5678\nfig 9012\n"
    (tmp_path / "a.txt").write_text(content)
    command = COMMANDS[kind].format(file="a.txt").split()
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    output, answer = run_command(kind, "a.txt", content)
    assert output == printed.strip()
    assert answer in output.split()


def test_running_the_prefix_once_changes_nothing(chat: ChatFormat, model: Any) -> None:
    demonstrations = Demonstrations(chat, 1)
    batch = [demonstrations.draw(0.5, with_examples=True) for _ in range(4)]
    once, owner = warm.token_logprobs(model, batch, demonstrations.prefix)
    whole, _ = warm.token_logprobs(model, batch, [])
    assert torch.allclose(once, whole, atol=1e-4)
    assert owner.tolist() == [i for i, d in enumerate(batch) for trained in d.trained if trained]


def test_warm_start_learns(chat: ChatFormat, model: Any) -> None:
    demonstrations = Demonstrations(chat, 9)
    batch = [demonstrations.draw(1.0, with_examples=False) for _ in range(8)]
    before = float(warm.token_logprobs(model, batch, [])[0].mean().detach())
    told: list[str] = []
    right = warm.warm_start(model, chat, told.append, [warm.Phase("a few", 12, 1.0, False)])
    assert float(warm.token_logprobs(model, batch, [])[0].mean().detach()) > before + 1
    assert 0.0 <= right < 0.1 and told[0] == "warm start: 12 steps on a few"


@pytest.mark.slow
def test_tiny_knows_the_tool_but_not_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    path = prepare("tiny")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert 0.2 <= warm.right_probability(model, Demonstrations(ChatFormat.open(path), 123)) <= 0.6
