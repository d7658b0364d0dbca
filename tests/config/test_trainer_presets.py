"""``trainer=NAME``: each preset is whole, valid with every experiment, and has what its paper says."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prorl_hpc.cli.launch import main
from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.config.store import compose, conf_dir
from prorl_hpc.config.validation import validate

PRESETS = sorted(path.stem for path in (conf_dir() / "trainer").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
SIZES = ("steps", "groups_per_step", "group_size", "max_rows_per_step", "learning_rate", "eval_prompts", "dtype")
PIECES = ("advantage", "policy_loss", "aggregation", "clip_low", "clip_high")


@lru_cache
def composed(*words: str) -> ProrlConfig:
    return compose(list(words))


def test_there_is_one_for_every_algorithm() -> None:
    wanted = "async cispo dapo dr_grpo gspo grpo ppo reinforce_pp rloo"
    assert set(wanted.split()) <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experiment", ["", *EXPERIMENTS])
def test_each_goes_with_each_experiment(preset: str, experiment: str) -> None:
    words = [f"experiment={experiment}"] if experiment else []
    config = composed(f"trainer={preset}", *words)
    assert validate(config) == []
    sizes = composed(*words).trainer
    assert [getattr(config.trainer, name) for name in SIZES] == [getattr(sizes, name) for name in SIZES]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("dapo", "async")])
def test_each_says_all_that_makes_the_algorithm(preset: str) -> None:
    """Also what is the default today, which may be another tomorrow."""
    own = OmegaConf.load(conf_dir() / "trainer" / f"{preset}.yaml")
    assert set(PIECES) <= own.keys() <= {field.name for field in dataclasses.fields(TrainerConfig)} | {"defaults"}


@pytest.mark.parametrize(
    ("preset", "pieces"),
    [
        ("dapo", ("group", "clip", "token_mean", 0.2, 0.28)),
        ("grpo", ("group", "clip", "seq_mean_token_mean", 0.2, 0.2)),
        ("dr_grpo", ("group_mean", "clip", "seq_mean_token_sum_norm", 0.2, 0.2)),
        ("rloo", ("leave_one_out", "clip", "seq_mean_token_sum", 0.2, 0.2)),
        ("reinforce_pp", ("batch", "clip", "token_mean", 0.2, 0.2)),
        ("gspo", ("group", "sequence_clip", "seq_mean_token_mean", 3e-4, 4e-4)),
        ("cispo", ("group", "cispo", "token_mean", 1.0, 4.0)),
        ("ppo", ("gae", "clip", "token_mean", 0.2, 0.2)),
        ("async", ("group", "clip", "token_mean", 0.2, 0.28)),
    ],
)
def test_the_pieces_are_those_of_the_papers(preset: str, pieces: tuple[object, ...]) -> None:
    trainer = composed(f"trainer={preset}").trainer
    assert tuple(getattr(trainer, name) for name in PIECES) == pieces


def test_only_dapo_and_its_kin_sample_dynamically() -> None:
    dynamic = [name for name in PRESETS if composed(f"trainer={name}").trainer.dynamic_sampling]
    assert set(dynamic) == {"dapo", "cispo", "async"}


def test_dr_grpos_constant_follows_the_task() -> None:
    config = compose(["trainer=dr_grpo", "task.max_turns=7", "task.max_turn_tokens=11"])
    assert config.trainer.aggregation_tokens == 77
    assert compose(["trainer=dr_grpo", "trainer.aggregation_tokens=3000"]).trainer.aggregation_tokens == 3000


def test_a_dry_run_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed", reason="the trainer needs the extra [train]")
    code = main(["--dry-run", "-m", f"trainer={','.join(PRESETS)}", "experiment=quick", f"run.root={tmp_path}"])
    assert code == 0, capsys.readouterr().err


def test_a_preset_of_ones_own_builds_on_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("defaults: [gspo, _self_]\nepochs: 3\n")
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path))
    trainer = compose(["trainer=mine", "experiment=quick"]).trainer
    assert (trainer.policy_loss, trainer.epochs, trainer.learning_rate) == ("sequence_clip", 3, 1e-3)
