"""``bench trainer``: its batch, its arithmetic, and a real step and real logprobs of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.bench import trainer, trainer_logprobs, trainer_overlap, trainer_publish, trainer_step
from prorl_hpc.bench.inference_bed import small_model
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.trainer_batch import BatchSize, FixedBatch, vocabulary_of
from prorl_hpc.bench.trainer_logprobs import Ran
from prorl_hpc.bench.trainer_publish import CONSTANT_S
from prorl_hpc.bench.trainer_publisher import Found, Published, copied_s
from prorl_hpc.bench.trainer_step import OURS, ROW_BY_ROW, TRL, StepBench, StepPlan
from prorl_hpc.bench.trainer_steps import Taken
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Status

SIZE = BatchSize(groups=2, samples=4, prompt_tokens=(20, 30), completion_tokens=(10, 40))


def quiet(words: str) -> None:
    pass


def taken(seconds: list[float], peak_mib: float, norm: float = 2.0) -> Taken:
    return Taken(seconds, [norm] * len(seconds), peak_mib, "software 1.0")


def test_the_batch_is_the_same_each_time_and_keeps_to_its_size() -> None:
    batch = FixedBatch.draw(SIZE, 1000)
    assert batch == FixedBatch.draw(SIZE, 1000) != FixedBatch.draw(SIZE, 1000, seed=1)
    assert len(batch.prompts) == 2 and all(len(group) == 4 for group in batch.completions)
    assert all(20 <= len(prompt) <= 30 for prompt in batch.prompts)
    assert all(10 <= len(c) <= 40 and max(c) < 1000 for group in batch.completions for c in group)
    assert all(len(set(rewards)) == 4 for rewards in batch.rewards), "a group of equal rewards has no gradient"
    assert batch.trained_tokens == sum(len(c) for group in batch.completions for c in group)
    assert batch.tokens == batch.trained_tokens + 4 * sum(map(len, batch.prompts))
    assert batch.padded_length >= max(map(len, batch.sequences))


def test_a_batch_to_warm_up_with_has_short_completions_and_their_logprobs() -> None:
    short = FixedBatch.draw(SIZE, 1000).shortened(8)
    assert short.tokens < FixedBatch.draw(SIZE, 1000).tokens
    for completions, logprobs in zip(short.completions, short.logprobs, strict=True):
        assert [len(c) for c in completions] == [len(x) for x in logprobs]
        assert all(1 <= len(c) <= 5 for c in completions)


def test_the_batch_is_delivered_as_the_service_does() -> None:
    batch = FixedBatch.draw(SIZE, 1000)
    result = batch.as_result()
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    assert result.progress.accepted == 2 and len(rollouts) == 8
    assert [r.trajectory.token_ids for r in rollouts] == batch.sequences
    assert all(r.status is Status.DONE and r.trajectory.num_trained_tokens for r in rollouts)


def test_tokens_per_second_and_memory_are_ratios_of_medians() -> None:
    plan, batch = StepPlan(SIZE, turns=3, steps=1), FixedBatch.draw(SIZE, 1000)
    found = {
        OURS: [taken([1.0], 100.0), taken([9.0], 100.0), taken([2.0], 300.0)],
        ROW_BY_ROW: [taken([5.0], 200.0)] * 3,
        TRL: [taken([4.0], 200.0), taken([4.0], 200.0), taken([5.0], 200.0)],
    }
    pace, told, peak, _, norm = trainer_step.figures(plan, batch, found)
    assert (pace.value, pace.goal, pace.holds) == (pytest.approx(2.0), ">= 1", True)
    assert (told.value, told.holds) == (pytest.approx(0.8), None)
    assert (peak.value, peak.goal, peak.holds) == (0.5, "< 1", True)
    assert norm.holds is True
    assert f"{batch.tokens} tokens" in pace.detail


def test_sides_with_other_gradients_have_not_done_the_same_work() -> None:
    plan, batch = StepPlan(SIZE, turns=1, steps=1), FixedBatch.draw(SIZE, 1000)
    found = {
        OURS: [taken([1.0], 1.0, norm=2.0)],
        ROW_BY_ROW: [taken([1.0], 1.0, norm=2.0)],
        TRL: [taken([1.0], 1.0, norm=2.5)],
    }
    assert trainer_step.figures(plan, batch, found)[-1].holds is False


def published(total_s: float, copy_s: float, gap: float = 1e-6) -> Found:
    return Found(540 << 20, [Published(total_s, 0.4, 1.0, copy_s, gap)] * 3, {"pause": 0.01, "load": 0.7})


def test_an_update_is_held_against_twice_the_copy_and_the_constant() -> None:
    update, _, copy, probe = trainer_publish.disk_figures(published(total_s=1.4, copy_s=0.5))
    assert (update.value, update.goal, update.holds) == (pytest.approx((1.4 - CONSTANT_S) / 0.5), "<= 2", True)
    assert copy.value == 0.5 and probe.holds is True
    assert trainer_publish.disk_figures(published(total_s=1.9, copy_s=0.5))[0].holds is False
    assert trainer_publish.disk_figures(published(1.4, 0.5, gap=0.1))[-1].holds is False


def test_direct_transfer_is_told_against_files() -> None:
    _, ratio, _ = trainer_publish.direct_figures(published(1.0, 0.0), published(2.0, 0.5))
    assert (ratio.value, ratio.holds) == (0.5, None)


def test_a_copy_is_timed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 1000)
    assert copied_s([str(file)]) > 0
    assert list(tmp_path.iterdir()) == [file]
    assert copied_s([]) == 0.0


def step(number: int, rollouts: float, total: float, saving: float = 0.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "seconds": {"rollouts": rollouts, "saving": saving, "total": total}}


def test_the_waiting_is_counted_from_the_second_step_on_and_saving_is_left_out() -> None:
    overlapping = [step(1, 30.0, 60.0), step(2, 1.0, 10.0), step(3, 2.0, 20.0, saving=10.0)]
    synchronous = [step(1, 30.0, 60.0), step(2, 10.0, 20.0)]
    idle, before, pace = trainer_overlap.figures(synchronous, overlapping)
    assert (idle.value, idle.goal, idle.holds) == (pytest.approx(3 / 20), "< 0.2", True)
    assert (before.value, before.holds) == (0.5, None)
    assert pace.value == pytest.approx(0.5)
    with pytest.raises(RunError, match="the run has 1 steps"):
        trainer_overlap.idle_fraction([step(1, 30.0, 60.0)])


def test_logprobs_are_compared_by_memory_and_value() -> None:
    ours, theirs = Ran([1.0], 100.0, 120.0, [-1.0, -2.0], 3.0), Ran([2.0], 100.0, 200.0, [-1.0, -2.00001], 3.0)
    memory, time, differ, gradient = trainer_logprobs.figures([ours], [theirs], "some rows")
    assert (memory.value, memory.holds) == (pytest.approx(0.2), True)
    assert (time.value, time.holds) == (0.5, None)
    assert differ.value == pytest.approx(1e-5) and differ.holds is True and gradient.holds is True


def test_every_part_is_told_of_and_measured() -> None:
    assert set(trainer.PARTS) == set(trainer._MEASURES)


needs_tiny = pytest.mark.skipif(
    not prepared_model("tiny").is_dir(), reason="the tiny model is not there: `prorl-hpc model prepare tiny` makes it"
)


@pytest.mark.train
@needs_tiny
def test_a_real_step_of_the_tiny_model(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        bench = StepBench(StepPlan(SIZE, turns=1, steps=2, model="tiny"), tmp_path, processes)
        assert max(max(ids) for ids in bench.batch.sequences) < vocabulary_of(small_model("tiny"))
        found = bench.ours(share_prompts=True)
    assert len(found.seconds) == len(found.grad_norms) == 2 and min(found.seconds) > 0
    assert min(found.grad_norms) > 0 and found.peak_mib > 100
    assert json.loads((tmp_path / "asked.json").read_text())["micro_batch_tokens"] == 4 * bench.batch.padded_length


@pytest.mark.train
@needs_tiny
def test_real_logprobs_of_the_tiny_model_agree(tmp_path: Path) -> None:
    chunked, plain = trainer_logprobs.compare(small_model("tiny"), 4, 160, 1, quiet)
    figures = {figure.name: figure for figure in trainer_logprobs.figures(chunked, plain, "tiny")}
    assert figures["logprobs: largest difference"].holds is True
    assert figures["logprobs: gradient's norm differs by"].holds is True
