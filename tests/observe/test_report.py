from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, Status
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.observe.report import write_report
from prorl_hpc.observe.restarts import Restart, RestartLog
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.observe.run_figures import loadable_checkpoints, wilson_interval

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path)
    return RunDirectory.create(config)


def fill(run: RunDirectory) -> None:
    log = MetricsLog(run.metrics_file)
    log.append({"kind": "eval", "step": 0, "time": 1.0, "reward": 0.03125, "successes": 2, "rollouts": 64})
    for step in range(1, 5):
        log.append(
            {
                "kind": "step",
                "step": step,
                "time": float(step),
                "reward": 0.2 * step,
                "rollouts": 32,
                "groups_accepted": 4,
                "groups_uniform": step,
                "groups_broken": 0,
                "tokens_generated": 600,
                "tokens_trained": 560,
                "groups_stale": int(step == 4),
                "staleness": 0.25 * (step > 1),
                "staleness_max": int(step > 1),
                "seconds": {"rollouts": 10.0, "training": 28.0, "publishing": 2.0, "total": 41.0},
                "logprob_gap_mean": 1e-6,
                "logprob_gap_max": step * 1e-5,
            }
        )
    log.append({"kind": "eval", "step": 4, "time": 9.0, "reward": 0.9375, "successes": 60, "rollouts": 64})
    broken = RolloutResult("b.g0.s0", "b.g0", 0, "t", Status.FAILED, failure=Failure(None, FailureKind.SANDBOX, "x"))
    fine = RolloutResult("b.g0.s1", "b.g0", 1, "t", Status.DONE, reward=1.0)
    progress = BatchProgress("b", BatchState.DONE, 1, 1, 0, 0, 0, 1, 1, 1)
    group = GroupResult("b.g0", 0, GroupOutcome.ACCEPTED, [broken, fine])
    RolloutStore(run).write_batch("b", BatchResult(progress, [group], 1.0))
    for step in (2, 10):
        (run.checkpoints / f"step-{step}").mkdir()
        (run.checkpoints / f"step-{step}" / "config.json").write_text("{}")
    (run.checkpoints / "step-11").mkdir()  # half-written: no model in it


def test_report_of_a_finished_run(run: RunDirectory) -> None:
    fill(run)
    run.finished_marker.touch()
    text = write_report(run).read_text()
    for part in (
        "**finished**",
        "4 of 16",
        "0.031 (2 of 64 solved, 95 % interval of the success rate 0.9% to 10.7%)",
        "held-out reward after step 4 | 0.938 (60 of 64 solved",
        "rollouts per second | 3.20",
        "generated tokens per second | 60.0",
        "training | 1:52 | 70%",
        "trained tokens per second of training | 20.0",
        "trainer idle, waiting for rollouts | 24% of the steps' time",
        "age of the tokens trained on | 0.19 weight versions in the mean, 1 at most",
        "| 10 |",
        "1 sandbox",
        "4.0e-05",
        "step-10",
        f"vllm serve {run.checkpoints / 'step-10'}",
        "`rollouts`",
    ):
        assert part in text, part
    assert "resume" not in text
    assert run.reward_plot.read_bytes().startswith(PNG)


def test_report_names_the_algorithm_the_best_model_and_the_last_steps_spread(run: RunDirectory) -> None:
    fill(run)
    log = MetricsLog(run.metrics_file)
    log.append({"kind": "step", "step": 5, "loss": 0.1, "entropy": 1.25, "clip_fraction": 0.02})
    log.append({"kind": "step", "step": 6, "reward": 0.9})  # nothing was trained
    (run.checkpoints / "best").mkdir()
    write_json(run.checkpoints / "best" / "best.json", {"step": 4, "reward": 0.9375, "held_out": {}})
    text = write_report(run).read_text()
    for part in (
        "| algorithm | `advantage=group`, `policy_loss=clip (clip_low=0.2, clip_high=0.28)`, `aggregation=token_mean`",
        "1 update per step",
        "| learning rate | 3e-05 |",
        f"| best held-out reward | 0.938 after step 4: `{run.checkpoints / 'best'}` |",
        "| entropy, nats, last step with an update | 1.250 |",
        "| share of tokens clipped, last step with an update | 0.020 |",
    ):
        assert part in text, part
    assert "cannot be compared" not in text


def test_report_tells_of_accepted_groups_that_taught_nothing(run: RunDirectory) -> None:
    MetricsLog(run.metrics_file).append({"kind": "step", "step": 1, "groups_accepted": 8, "groups_equal_rewards": 7})
    assert "| of these: all samples had the same reward, so no advantage | 7 |" in write_report(run).read_text()


def test_held_out_rewards_over_other_rows_are_not_set_side_by_side_in_silence(run: RunDirectory) -> None:
    log = MetricsLog(run.metrics_file)
    for step, prompts in ((0, 64), (4, 8)):
        held_out = {"prompts": prompts, "samples": 1, "temperature": 1.0, "digest": f"d{prompts}"}
        log.append({"kind": "eval", "step": step, "reward": 0.5, "held_out": held_out})
    text = write_report(run).read_text()
    assert "**held-out rewards cannot be compared**" in text
    assert "64 prompts × 1 at temperature 1.0 (rows d64) first, 8 prompts × 1 at temperature 1.0 (rows d8) last" in text


def test_evaluations_have_a_place_in_the_time(run: RunDirectory) -> None:
    log = MetricsLog(run.metrics_file)
    for step in (0, 1, 2):
        log.append({"kind": "eval", "step": step, "reward": 0.5, "seconds": 10.0})
        if step:
            log.append({"kind": "step", "step": step, "seconds": {"rollouts": 5.0, "training": 30.0, "total": 35.0}})
    text = write_report(run).read_text()
    for part in (
        "| seconds per step | 35.0 |",
        "| seconds per step, evaluations included | 50.0 |",
        "| trainer idle, waiting for rollouts | 14% of the steps' time |",
        "| trainer idle, waiting for rollouts or an evaluation | 40% of the whole time |",
        "| evaluating | 0:30 | 30% |",
    ):
        assert part in text, part


def test_rates_are_those_of_making_batches_where_that_is_known(run: RunDirectory) -> None:
    log = MetricsLog(run.metrics_file)
    for step in (1, 2):
        seconds = {"rollouts": 1.0, "training": 9.0, "total": 10.0}
        log.append({"kind": "step", "step": step, "rollouts": 32, "generation_s": 8.0, "seconds": seconds})
    log.append({"kind": "step", "step": 3, "groups_stale": 2, "groups_replaced": 3, "seconds": {"total": 10.0}})
    text = write_report(run).read_text()
    assert "rollouts per second | 4.00" in text, "made in 16 s, waited for in 2"
    assert "| stale: accepted, but older than `trainer.staleness` allows, so not trained on | 2 |" in text
    assert "taken in place of a uniform or broken one | 3 |" in text


def test_failures_that_differ_in_numbers_alone_are_told_once_with_their_message(run: RunDirectory) -> None:
    def broken(number: int, stage: Stage | None, kind: FailureKind, message: str) -> RolloutResult:
        failure = Failure(stage, kind, message)
        return RolloutResult(f"b.g0.s{number}", "b.g0", number, "t", Status.FAILED, failure=failure)

    results = [broken(n, Stage.INIT, FailureKind.TASK, f"KeyError: 'row {n}'\nmore") for n in range(3)]
    results.append(broken(3, None, FailureKind.SANDBOX, "a|b"))
    progress = BatchProgress("b", BatchState.DONE, 1, 1, 0, 0, 0, 1, 1, 1)
    RolloutStore(run).write_batch(
        "b", BatchResult(progress, [GroupResult("b.g0", 0, GroupOutcome.BROKEN, results)], 1.0)
    )
    text = write_report(run).read_text()
    assert "| 3 | init | task | KeyError: 'row 0' |" in text
    assert "| 1 | – | sandbox | a\\|b |" in text


def test_report_says_who_the_agent_was_and_how_often_it_ended_badly(run: RunDirectory) -> None:
    assert "| agent | native: the task's own loop |" in write_report(run).read_text()
    config = run.load_config()
    config.agent.kind, config.agent.name = "outside", "mini_swe_agent"
    config.task.train.path = "problems.jsonl"
    config.run.id = "other"
    other = RunDirectory.create(config)
    results = [
        RolloutResult(f"b.g0.s{n}", "b.g0", n, "t", Status.DONE, reward=0.0, metrics={"agent_exit_code": code})
        for n, code in enumerate((0, 1, 137))
    ]
    progress = BatchProgress("b", BatchState.DONE, 1, 1, 0, 0, 0, 1, 1, 1)
    group = GroupResult("b.g0", 0, GroupOutcome.UNIFORM, results)
    RolloutStore(other).write_batch("b", BatchResult(progress, [group], 1.0))
    text = write_report(other).read_text()
    assert "mini_swe_agent, an outside agent; **2 rollouts ended with an exit code other than 0**" in text
    assert "rows of problems.jsonl, at most a tenth of them, are held out and not trained on" in text


def test_report_of_a_run_that_failed_before_its_first_step(run: RunDirectory) -> None:
    write_json(
        run.failure_file,
        {"name": "inference-0", "node": "n1", "what": "exited with code 1", "last_lines": ["Trace", "OSError: no"]},
    )
    text = write_report(run).read_text()
    for part in (
        "**failed**",
        "0 of 16",
        "**inference-0**",
        "on n1 exited with code 1. Its last lines",
        "OSError: no",
        "No step was finished",
    ):
        assert part in text, part
    assert f"python -m prorl_hpc resume {run.path}" in text and "no checkpoint yet" in text
    assert run.reward_plot.read_bytes().startswith(PNG)


def test_report_of_a_stopped_run_says_why_and_how_to_go_on(run: RunDirectory) -> None:
    fill(run)
    run.stop_marker.write_text("interrupted from the keyboard\n")
    text = write_report(run).read_text()
    assert "**stopped** (interrupted from the keyboard)" in text and "continues from the newest checkpoint" in text


def test_report_of_a_service_without_a_trainer_speaks_of_no_training(tmp_path: Path) -> None:
    config = ProrlConfig()
    config.run.root, config.trainer.enabled = str(tmp_path), False
    run = RunDirectory.create(config)
    run.stop_marker.write_text("prorl-hpc stop\n")
    text = write_report(run).read_text()
    assert "none: the rollout service alone" in text and "starts the service again" in text
    for word in ("step", "reward", "checkpoint is", "no checkpoint"):
        assert word not in text, word
    assert not run.reward_plot.exists()


def test_report_names_the_restarts(run: RunDirectory) -> None:
    RestartLog(run.restarts_file(0)).append(Restart("coordinator", "node1", "was killed by SIGKILL", 1, 3, 10.0))
    text = write_report(run).read_text()
    assert "| started again | coordinator was killed by SIGKILL (1 of 3 restarts) |" in text


def test_report_copes_with_records_that_miss_keys(run: RunDirectory) -> None:
    log = MetricsLog(run.metrics_file)
    log.append({"kind": "step", "step": 1})
    log.append({"kind": "step", "step": 2, "reward": None, "seconds": 3.5})
    log.append({"kind": "eval", "step": 0, "reward": 0.5})
    run.failure_file.write_text("half a fi")
    assert "held-out reward before training | 0.500" in write_report(run).read_text()


def test_checkpoints_are_ordered_by_number(run: RunDirectory) -> None:
    fill(run)
    assert [path.name for path in loadable_checkpoints(run)] == ["step-2", "step-10"]


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0)), (0, 0, (0.0, 1.0))],
)
def test_wilson_interval(successes: int, trials: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=1e-4)
