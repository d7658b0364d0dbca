"""resume: which settings may change, what is kept of them, and that a refusal leaves all as it was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.cli import resume
from prorl_hpc.cli.attempt import run_attempt
from prorl_hpc.cli.config_changes import changed_settings, needs_fresh, with_overrides
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import PolicyConfig, ProrlConfig
from prorl_hpc.config.store import compose, load
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.rollout.epoch import epoch_token
from prorl_hpc.slurm import executors
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import JobRecord
from prorl_hpc.transport.keys import RunKeys


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["trainer.steps=200", "cluster.time_minutes=600"], {"trainer.steps": 200, "cluster.time_minutes": 600}),
        (["+engine.env.A=1"], {"engine.env": {"A": "1"}}),
        (["engine.env.A=1"], {"engine.env": {"A": "1"}}),
        (["trainer.adam_betas=[0.8,0.9]"], {"trainer.adam_betas": [0.8, 0.9]}),
        (["cluster.rollout.nodes=3"], {"cluster.rollout.nodes": 3}),
        (["trainer.steps=16"], {}),
        (  # the group first, whatever the order
            ["cluster.time_minutes=7", "cluster.inference.nodes=3", "cluster=slurm"],
            {
                "cluster.kind": "slurm",
                "cluster.time_minutes": 7,
                "cluster.inference.nodes": 3,
            },
        ),
    ],
)
def test_single_settings_are_changed(words: list[str], changed: dict[str, Any]) -> None:
    config = ProrlConfig()
    new, wrong = with_overrides(config, words)
    found = changed_settings(config, new)
    assert not wrong
    assert {name: after for name, (_, after) in found.items()} == changed


def test_a_preset_changes_its_algorithm_and_no_sizes() -> None:
    """Also back again, and to what its file calculates from the run's own settings."""
    config = compose(["experiment=quick", "trainer.clip_high=0.4", "task.max_turns=7", "task.max_turn_tokens=11"])
    sizes = ("steps", "groups_per_step", "group_size", "max_rows_per_step", "learning_rate", "eval_prompts", "dtype")
    before = {name: getattr(config.trainer, name) for name in sizes}
    for preset in ("gspo", "dr_grpo", "async", "dapo"):
        config, wrong = with_overrides(config, [f"trainer={preset}"])
        assert wrong == []
        assert {name: getattr(config.trainer, name) for name in sizes} == before
        words = [f"trainer={preset}", "experiment=quick", "task.max_turns=7", "task.max_turn_tokens=11"]
        assert config.trainer == compose(words).trainer, "nothing of the one before is left over"
    config, wrong = with_overrides(config, ["trainer.epochs=2", "trainer=gspo"])
    assert (config.trainer.epochs, config.trainer.policy_loss) == (2, "sequence_clip")


def test_a_shells_variables_stay_as_they_are() -> None:
    config = ProrlConfig()
    config.cluster.setup = ["export A=${B:-x} ${C##*/} \\${D}", "echo \\\\ $E"]
    config.engine.env = {"F": "${HOME}/x"}
    config.policies = {"judge": PolicyConfig()}
    for words, changes in (([], {}), (["trainer.steps=17"], {"trainer.steps": (16, 17)})):
        changed, wrong = with_overrides(config, words)
        assert (changed_settings(config, changed), wrong) == (changes, [])
        assert type(changed.policies["judge"]) is PolicyConfig


def test_a_preset_of_ones_own_changes_what_it_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("defaults: [gspo, _self_]\nlearning_rate: 2.0e-5\n")
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path))
    config = compose(["experiment=quick"])
    changed, wrong = with_overrides(config, ["trainer=mine"])
    found = changed_settings(config, changed)
    assert not wrong
    assert found["trainer.learning_rate"] == (1e-3, 2e-5), "though dapo.yaml has the same"
    assert found["trainer.policy_loss"] == ("clip", "sequence_clip")
    assert not {"trainer.steps", "trainer.groups_per_step", "trainer.eval_prompts"} & found.keys()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trainer.stepss=3"], "did you mean trainer.steps?"),
        (["clustr.time_minutes=3"], "did you mean cluster?"),
        (["+trainer.foo=1"], "there is no setting trainer.foo"),
        (["trainer.steps=abc"], "trainer.steps: Value 'abc'"),
        (["trainer.steps.x=1"], "trainer.steps"),
        (["cluster=slurmm"], "there is no such choice; did you mean cluster=slurm?"),
        (["run=x"], "run has settings of its own: name,"),
        (["cluster.rollout=x"], "cluster.rollout has settings of its own: nodes,"),
        (["run.root=/elsewhere"], "the run stays in its directory"),
        (["trainer.steps=1,2"], "one value of each setting"),
        (["~engine.env.Z"], "can be taken out"),
        (["trainer.steps=[1"], "is not an override"),
    ],
)
def test_what_cannot_be_changed_is_answered(words: list[str], answer: str) -> None:
    new, (wrong,) = with_overrides(ProrlConfig(), words)
    assert answer in wrong and new == ProrlConfig()


def test_what_decides_orders_needs_a_fresh_epoch() -> None:
    harmless = ("cluster.time_minutes", "cluster.rollout.nodes", "run.restarts", "trainer.steps", "rollout.run_slots")
    assert not any(map(needs_fresh, harmless))
    out_of_memory = (
        "trainer.gradient_checkpointing",
        "trainer.offload",
        "trainer.zero_stage",
        "trainer.deepspeed_file",
    )
    assert not any(map(needs_fresh, out_of_memory)), "rollouts are not lost for lack of memory"
    harmful = ("task.max_turns", "model.path", "trainer.temperature", "trainer.group_size", "run.seed", "rollout.run_s")
    assert all(map(needs_fresh, harmful))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Stopped after its first attempt; nothing is looked at on this machine, and nothing started."""
    monkeypatch.chdir(tmp_path)
    config = ProrlConfig()
    config.run.root, config.model.path = str(tmp_path / "runs"), "/no/model"
    run = RunDirectory.create(config)
    RunKeys.create(run.keys)
    run.begin_attempt(1)
    write_json(run.jobs / "job.json", JobRecord("local", "1", "elsewhere", 0, time.time(), 1))
    write_ending(run, AttemptEnding(Ending.STOPPED, "", time.time()))
    epoch_token(run)
    monkeypatch.setattr(resume, "preflight", lambda config: [])
    monkeypatch.setattr(resume, "run_attempt", lambda run, config, plan, detach, lock: run.begin_attempt(2) and 0)
    return run


def test_each_attempt_keeps_its_settings(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    epoch = epoch_token(run)
    assert main(["resume", "trainer.steps=99", str(run.path), "--detach", "cluster.time_minutes=7"]) == 0
    assert "trainer.steps: 16 → 99" in capsys.readouterr().out
    first, second = run.all_attempts()
    steps = [load(attempt.attempt_config_file).trainer.steps for attempt in (first, second)]
    assert steps == [16, 99]
    assert (run.load_config().trainer.steps, run.load_config().cluster.time_minutes) == (99, 7)
    assert epoch_token(run) == epoch


def test_orders_that_would_change_are_refused_without_fresh(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    epoch, stored = epoch_token(run), run.config_file.read_text()
    assert main(["resume", str(run.path), "task.max_turns=9"]) == 2
    said = capsys.readouterr().err
    assert "task.max_turns decides what is ordered" in said
    assert "--fresh" in said
    assert (epoch_token(run), run.config_file.read_text(), len(run.all_attempts())) == (epoch, stored, 1)
    assert main(["resume", str(run.path), "--fresh", "task.max_turns=9"]) == 0
    assert epoch_token(run) != epoch
    assert run.load_config().task.max_turns == 9


def test_a_value_that_no_run_can_have_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(run.path), "trainer.steps=0"]) == 2
    assert "trainer.steps=0" in capsys.readouterr().err
    assert run.load_config().trainer.steps == 16


def test_all_that_is_wrong_is_told_at_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that does not exist hides neither a value that cannot be nor one that needs --fresh."""
    assert main(["resume", str(run.path), "trainer.stps=3", "x.y=1", "run.drain_s=-1", "task.max_turns=9"]) == 2
    said = capsys.readouterr().err
    for words in ("did you mean trainer.steps?", "there is no setting x", "run.drain_s=-1", "task.max_turns decides"):
        assert words in said


def test_a_refused_submission_leaves_all_as_it_was(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*given: Any) -> None:
        raise ConfigError("Slurm refused the job")

    monkeypatch.setattr(resume, "run_attempt", run_attempt)
    monkeypatch.setattr(executors, "_submitted", refused)
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    assert main(["resume", str(run.path), "--fresh", "trainer.steps=99"]) == 2
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    assert run.newest_attempt == 1
    assert len(run.all_attempts()) == 1


def test_a_finished_run_goes_on_only_with_more_steps(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_ending(run, AttemptEnding(Ending.FINISHED, "", time.time()))
    run.metrics_file.write_bytes(msgspec.json.encode({"kind": "step", "step": 16}) + b"\n")
    assert main(["resume", str(run.path)]) == 0
    assert "nothing to go on with" in capsys.readouterr().out
    assert len(run.all_attempts()) == 1
    assert main(["resume", str(run.path), "trainer.steps=17"]) == 0
    assert len(run.all_attempts()) == 2


def test_fewer_steps_than_are_done_are_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.metrics_file.write_bytes(msgspec.json.encode({"kind": "step", "step": 12}) + b"\n")
    assert main(["resume", str(run.path), "trainer.steps=10"]) == 2
    assert "trainer.steps=10: the run has done 12 steps already; give more than 12" in capsys.readouterr().err
    assert len(run.all_attempts()) == 1
    assert main(["resume", str(run.path), "trainer.steps=13"]) == 0


def test_a_run_that_may_live_is_not_resumed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.ending_file.unlink()
    assert main(["resume", str(run.path)]) == 1
    assert "started on elsewhere" in capsys.readouterr().err


def test_two_runs_at_once_are_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "a", "b"]) == 2
    assert "give one run" in capsys.readouterr().err


def test_what_the_checkpoint_cannot_go_on_with_is_refused_and_not_stored(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run.checkpoints / "step-3" / "trainer_state" / "state.json"
    state.parent.mkdir(parents=True)
    write_json(state, {"world": 1, "zero_stage": 1, "dtype": "torch.float32"})
    stored = run.config_file.read_text()
    words = ["trainer.zero_stage=2", "trainer.dtype=bfloat16", "trainer.ranks_per_node=2", "trainer.advantage=gae"]
    assert main(["resume", str(run.path), *words]) == 2
    said = capsys.readouterr().err
    for back in ("zero_stage=1", "dtype=float32", "ranks_per_node=1", "advantage=group"):
        assert f"go on with trainer.{back}" in said
    assert (run.config_file.read_text(), len(run.all_attempts())) == (stored, 1)
    assert main(["resume", str(run.path)]) == 0
