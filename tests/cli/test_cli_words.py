"""What the command line says before anything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.cli import composition, preflight
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import compose
from prorl_hpc.messages.errors import ConfigError

HEAVY = ("torch", "vllm", "transformers", "deepspeed")


def prorl(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prorl_hpc", *words]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.stepss=3", "did you mean trainer.steps"),
        ("steps=3", "did you mean trainer.steps"),
        ("engine=vlm", "did you mean engine=vllm? choices of engine: auto, scripted, transformers, vllm"),
        ("engin=vllm", "did you mean engine?"),
        ("trainer.steps=abc", "trainer.steps: Value 'abc'"),
        (
            "trainer=[1]",
            "trainer=[1]: trainer is a group, chosen by name: async, cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce_pp, rloo. Its settings are trainer.NAME=VALUE",
        ),
        ("+trainer.foo=1", "there is no setting trainer.foo"),
        ("agent.files.NOTES.md=x", "a name with a dot in it is written 'agent.files={NAME: value}'"),
        ("trainer.adam_betas=abc", "trainer.adam_betas=abc: must be a list, written [a, b]"),
        ("rollout.policy_weights=abc", "rollout.policy_weights=abc: must be names and values, written {name: value}"),
        ("policies.ba+se.model.path=/x", "'policies.ba+se.model.path=/x' is not an override"),
        ("foo", "'foo' is not an override"),
        ("trainer.steps=[1", "is not an override"),
    ],
)
def test_a_typo_is_answered_in_one_sentence(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composition.compose_all([override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hydra_is_as_its_users_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [c.config.trainer.steps for c in composition.compose_all(["--multirun", "trainer.steps=1,2"])] == [1, 2]
    assert not list(tmp_path.iterdir())
    shown = prorl("launch", "--cfg", "job", "trainer.steps=77", cwd=tmp_path)
    assert "steps: 77" in shown.stdout
    help_text = prorl("launch", "--help", cwd=tmp_path).stdout
    assert "site_gpu" in help_text
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("kind: slurm\naccount: me\n")
    (own,) = composition.compose_all(["--config-dir", str(tmp_path), "cluster=mine"])
    assert own.config.cluster.account == "me"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cluster"]


def test_all_errors_come_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "a"\n')
    words = ["trainer.steps=0", "task.train.path=bad.jsonl", "run.min_free_disk_gib=1e9", "model=path", "model.path=m"]
    done = prorl("launch", *words, cwd=tmp_path)
    assert done.returncode == 2
    for part in ("trainer.steps=0", "bad.jsonl:1", "GiB free", "/m is not a directory", "nothing was started"):
        assert part in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_preflight_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    errors = preflight.preflight(compose(["engine=vllm"]))
    assert any("pip install 'prorl_hpc[vllm]'" in error for error in errors)
    assert any("the trainer needs torch" in error and "prorl_hpc[train]" in error for error in errors)


def test_preflight_knows_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProrlConfig()
    config.run.root = "/proc/runs"
    config.run.runtime_root = "/tmp/" + "x" * 90
    config.run.min_free_memory_gib = 1e6
    errors = preflight.preflight(config)
    for words in ("run.root=/proc/runs", "socket paths", "GiB of memory available"):
        assert any(words in error for error in errors), (words, errors)


def test_a_cluster_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    errors = preflight.preflight(compose(["cluster=slurm", "+cluster.extra.acount=x"]))
    assert any("needs sbatch" in error for error in errors)
    assert any("did you mean account" in error for error in errors)


def test_dry_run_shows_plan_and_script_and_starts_nothing(tmp_path: Path) -> None:
    words = ["model=tiny", "cluster=slurm", "cluster.rollout.nodes=2", "cluster.inference.gpus=1", "--dry-run"]
    # a scheduler that is there by name only
    stub = tmp_path / "bin"
    stub.mkdir()
    for program in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        code = 1 if program == "scontrol" else 0
        (stub / program).write_text(f"#!/bin/sh\necho would start >&2\nexit {code}\n")
        (stub / program).chmod(0o755)
    done = prorl("launch", *words, cwd=tmp_path, env={"PATH": f"{stub}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    told = done.stdout.replace(sys.executable, "PYTHON").replace(str(tmp_path), "CWD")
    golden = Path(__file__).with_name("golden_dry_run.txt")
    if os.environ.get("PRORL_UPDATE_GOLDEN"):
        golden.write_text(told)
    assert told == golden.read_text()
    assert not list(tmp_path.glob("runs/*"))


def test_nothing_heavy_is_loaded_before_a_run(tmp_path: Path) -> None:
    program = (
        "import sys, prorl_hpc.__main__ as m\n"
        "codes = [m.main(['--help']), m.main(['launch', 'model=tiny', '--dry-run']), m.main(['status'])]\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], codes)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[] [0, 0, 0]", done.stdout + done.stderr


def test_verbs(tmp_path: Path) -> None:
    assert "did you mean launch" in prorl("lanch", cwd=tmp_path).stderr
    assert "there is no runs/latest here" in prorl("logs", cwd=tmp_path).stderr
    assert prorl("stop", str(tmp_path), cwd=tmp_path).returncode == 2
    assert "smollm2-135m" in prorl("model", "list", cwd=tmp_path).stdout
    examined = prorl("doctor", cwd=tmp_path)
    for subject in ("python", "engine", "trainer", "slurm", "sandbox", "user namespaces", "socket paths", "memory"):
        assert subject in examined.stdout
    environment = prorl("model", "path", "tiny", cwd=tmp_path, env={"PRORL_HOME": str(tmp_path / "home")})
    assert environment.returncode == 1
    assert environment.stdout.strip() == str(tmp_path / "home" / "models" / "tiny")
    assert json.dumps(environment.stderr) == '""'


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_run_root_that_cannot_be_is_refused_and_a_dry_run_makes_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    refused = prorl("launch", "model=tiny", f"run.root={place}", "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "file is not a directory" in refused.stderr
    prorl("launch", "model=tiny", "run.root=new/runs", "--dry-run", cwd=tmp_path)
    assert not (tmp_path / "new").exists()
