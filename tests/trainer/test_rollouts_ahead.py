"""Asynchronous training in virtual time: how old tokens may get, in which order, from anywhere, stopped anywhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from virtual_training import ROWS, Attempt, Service, replaced, rows_used, run_virtually

from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.prompts import PromptOrder
from prorl_hpc.trainer.stopping import Stopped

pytestmark = pytest.mark.train
STEPS = 6


def whole(root, staleness: int, generate_s: float = 8.0, **trainer) -> Attempt:
    async def work() -> Attempt:
        attempt = Attempt(root, Service(generate_s=generate_s), staleness=staleness, **trainer)
        await attempt.loop.run()
        return attempt

    return run_virtually(work)


def prompts(count: int) -> list[int]:
    return [int(row["number"]) for row in PromptOrder(ROWS, 0).take(0, count)]


@pytest.mark.parametrize("generate_s", [3.0, 8.0, 25.0])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_no_token_is_older_than_allowed_and_steps_and_prompts_keep_their_order(tmp_path, staleness, generate_s):
    attempt = whole(tmp_path, staleness, generate_s)
    trained = attempt.versions_trained()
    assert [step for step, _ in trained] == [1, 2, 3, 4, 5, 6]
    for step, versions in trained:
        assert all(step - staleness <= version <= step for version in versions), (step, versions)
    assert any(min(versions) < step for step, versions in trained) is (staleness > 0)

    used = rows_used(attempt.service)
    assert used == prompts(len(used)), "no prompt is skipped or repeated"
    assert attempt.loop.position == Position(STEPS, len(used))

    # Ordered when step s-1-k was trained and its weights were served, and never before the batch of step s-1 was there.
    ordered = {int(n.removeprefix("step-")): v for n, v in attempt.service.ordered_at if n.startswith("step")}
    assert list(ordered) == [1, 2, 3, 4, 5, 6]
    assert all(version >= max(1, step - staleness) for step, version in ordered.items()), ordered

    records = attempt.records()
    assert [r["weight_version"] for r in records] == [2, 3, 4, 5, 6, 7]
    assert all(r["staleness"] <= r["staleness_max"] <= staleness for r in records)
    assert "groups_stale" not in records[-1]


def test_the_tokens_of_a_batch_know_which_weights_wrote_each(tmp_path):
    trained = dict(whole(tmp_path, 1, generate_s=25.0).versions_trained())
    assert any(len(versions) > 1 for versions in trained.values()), "weights change while rollouts are under way"


def test_with_carried_groups_one_of_the_versions_is_theirs(tmp_path):
    async def work():
        attempt = Attempt(tmp_path, Service(), staleness=1, when_full="carry")
        await attempt.loop.run()
        return attempt.service.ordered_at

    ordered = {int(n.removeprefix("step-")): v for n, v in run_virtually(work) if n.startswith("step")}
    assert ordered == {step: step for step in range(1, STEPS + 1)}, "a group that ends a batch later is a version old"


def test_groups_that_are_too_old_are_left_out_and_counted(tmp_path):
    async def work():
        attempt = Attempt(tmp_path, Service(old="step-3"), staleness=1)
        await attempt.loop.run()
        return attempt

    attempt = run_virtually(work)
    record = attempt.records()[2]
    assert record["groups_stale"] == 1 and record["groups_accepted"] == 2 and record["staleness_max"] <= 1
    assert len({s.group_id for s in attempt.crew.trained[2].samples}) == 1


def test_a_trainer_that_has_rollouts_ahead_waits_less_for_them(tmp_path, monkeypatch):
    """Generation takes 8 s, training 10, the update 1.5."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), time=lambda: 0.0)
    monkeypatch.setattr("prorl_hpc.trainer.progress.time", clock)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sync = [r["idle_fraction"] for r in whole(tmp_path / "a", 0).records()]
    ahead = whole(tmp_path / "b", 1).records()
    assert sync == pytest.approx([8 / 19.5] * STEPS, abs=0.02)
    assert [r["idle_fraction"] for r in ahead[1:]] == pytest.approx([0.0] * (STEPS - 1), abs=1e-6)
    # Speeds of generation are those of the batch, not of the wait.
    assert ahead[3]["tokens_per_s"] == pytest.approx(ahead[3]["tokens_generated"] / 8)
    assert ahead[3]["generation_s"] == pytest.approx(8)
    assert ahead[3]["trained_tokens_per_s"] == pytest.approx(ahead[3]["tokens_trained"] / 10)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_run_goes_on_from_any_checkpoint_with_the_same_batches(tmp_path, staleness):
    (tmp_path / "first").mkdir()
    first = whole(tmp_path / "first", staleness, checkpoint_every=1)
    assert [p.step for p in first.crew.saved] == [1, 2, 3, 4, 5, 6]
    for position in [Position(), *first.crew.saved[:-1]]:
        # Batches up to two steps ahead were finished; later ones are made anew, by the same names.
        known = replaced(first.service)
        for name in [n for n in known.recorded if n.startswith("step") and int(n[5:]) > position.step + 2]:
            del known.recorded[name]
        root = tmp_path / f"from-{position.step}"
        root.mkdir()

        async def work(known=known, root=root, position=position) -> Attempt:
            attempt = Attempt(root, known, position, staleness=staleness)
            await attempt.loop.run()  # the service refuses an order that differs
            return attempt

        again = run_virtually(work)
        assert [step for step, _ in again.versions_trained()] == list(range(position.step + 1, STEPS + 1))
        assert rows_used(known) == rows_used(first.service)
        assert again.loop.position == first.loop.position
        assert all(step - staleness <= min(versions) for step, versions in again.versions_trained())


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    "moment", [0.2, 1.0, 3.0, 8.1, 9.9, 12.0, 17.0, 19.6, 20.3, 21.0, 25.0, 31.0, 38.7, 44.0, 70.0]
)
def test_a_stop_at_any_moment_leaves_a_checkpoint_and_loses_no_prompt(tmp_path, staleness, moment):
    async def stopped() -> Attempt:
        attempt = Attempt(tmp_path, Service(), staleness=staleness, pause_admission=True, eval_every=2)
        asyncio.get_running_loop().call_later(moment, attempt.stop.request)
        before = asyncio.all_tasks()
        with pytest.raises(Stopped):
            await attempt.loop.run()
        own = asyncio.all_tasks() - before - set(attempt.service.tasks.values())
        assert not own, "nothing of the trainer goes on"
        attempt.service.lose()
        return attempt

    cut = run_virtually(stopped)
    assert cut.service.held_until == 0.0
    position = cut.crew.saved[-1]
    assert position.step == cut.loop.position.step == len(cut.crew.trained)
    assert [r["step"] for r in cut.records()] == list(range(1, position.step + 1))

    (tmp_path / "again").mkdir()
    known = replaced(cut.service)

    async def again() -> Attempt:
        attempt = Attempt(tmp_path / "again", known, position, staleness=staleness, eval_every=2)
        await attempt.loop.run()
        return attempt

    rest = run_virtually(again)
    assert [step for step, _ in rest.versions_trained()] == list(range(position.step + 1, STEPS + 1))
    used = rows_used(known)
    assert used == prompts(len(used)) and rest.loop.position == Position(STEPS, len(used))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_what_goes_wrong_ahead_ends_the_run_when_its_turn_comes(tmp_path, staleness):
    async def work():
        attempt = Attempt(tmp_path, Service(broken="step-4"), staleness=staleness)
        with pytest.raises(ServiceError, match="the journal is gone"):
            await attempt.loop.run()
        return attempt

    attempt = run_virtually(work)
    assert [step for step, _ in attempt.versions_trained()] == [1, 2, 3], "what was made before is not lost"
    assert attempt.loop.position.step == 3


def test_a_failure_of_both_is_told_too(tmp_path, caplog):
    async def work():
        attempt = Attempt(tmp_path, Service(broken="step-2", refuses_update=2), staleness=1)
        with pytest.raises(RunError, match="no such file"):
            await attempt.loop.run()

    run_virtually(work)
    assert "rollouts ahead of training failed too: the journal is gone" in caplog.text


@pytest.mark.parametrize("wanted", [True, False])
def test_admission_is_paused_while_weights_are_loaded_where_that_is_wanted(tmp_path, wanted):
    attempt = whole(tmp_path, 1, pause_admission=wanted)
    assert attempt.service.paused_updates == ([1, 2, 3, 4, 5, 6, 7] if wanted else [])
    assert attempt.service.held_until == 0.0


def test_rollouts_are_held_back_as_long_as_loading_takes_and_no_longer_than_a_minute_by_a_trainer_that_dies(tmp_path):
    async def work():
        service = Service(load_s=300.0)
        attempt = Attempt(tmp_path, service, pause_admission=True, steps=1)
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(attempt.loop.run())
        await asyncio.sleep(299.0)
        assert service.held and loop.time() - service.holds[-1] <= 20.0
        assert service.held_until <= loop.time() + 60.0
        await running
        assert service.resumes == 2 and not service.held

    run_virtually(work)


def test_a_service_that_cannot_be_told_to_go_on_does_so_by_itself(tmp_path, caplog):
    class Gone(Service):
        async def resume(self, holder: str):
            raise ServiceError("not there", code="lost", status=503)

    async def work():
        attempt = Attempt(tmp_path, Gone(), pause_admission=True, steps=1)
        await attempt.loop.run()
        return attempt

    assert run_virtually(work).loop.position.step == 1
    assert "held back for 60 s more" in caplog.text


def test_admission_goes_on_after_an_update_that_failed(tmp_path):
    async def work():
        attempt = Attempt(tmp_path, Service(refuses_update=3), staleness=1, pause_admission=True)
        with pytest.raises(RunError, match="inference-0: no such file"):
            await attempt.loop.run()
        return attempt

    service = run_virtually(work).service
    assert service.paused_updates == [1, 2, 3, 3] and service.held_until == 0.0


def test_an_evaluation_is_of_the_present_weights_alone(tmp_path):
    attempt = whole(tmp_path, 3, eval_every=1)
    service = attempt.service
    for record in attempt.records("eval"):
        rollouts = [r for g in service.recorded[f"eval-{record['step']}"].groups for r in g.rollouts]
        versions = {s.weight_version for r in rollouts for s in r.trajectory.segments if s.trained}
        assert versions == {record["step"] + 1} == {record["weight_version"]}
        training = service.specs["step-1"].priority
        assert service.specs[f"eval-{record['step']}"].priority < training, "the trainer waits for it"


@pytest.mark.parametrize("staleness", [0, 1])
def test_batches_made_ahead_under_a_larger_staleness_are_trained_on_and_that_is_said(tmp_path, staleness, caplog):
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()

    async def cut() -> Attempt:
        attempt = Attempt(tmp_path / "first", Service(generate_s=3.0), staleness=2, steps=9)
        attempt.service.after_update = lambda version: attempt.stop.request() if version == 4 else None
        with pytest.raises(Stopped):
            await attempt.loop.run()
        attempt.service.lose()
        return attempt

    first = run_virtually(cut)
    assert first.loop.position.step == 3 and {"step-4", "step-5"} <= set(first.service.recorded)

    async def work() -> Attempt:
        known = replaced(first.service)
        again = Attempt(tmp_path / "again", known, first.loop.position, before=2, staleness=staleness, steps=9)
        await again.loop.run()
        return again

    again = run_virtually(work)
    assert f"trainer.staleness is {staleness} and was 2" in caplog.text
    trained = dict(again.versions_trained())
    assert list(trained) == [4, 5, 6, 7, 8, 9], "no step and no prompt is used up for nothing"
    assert not any(record.get("groups_stale") for record in again.records())
    assert min(trained[5]) == 3
    assert all(step - staleness <= min(trained[step]) for step in (7, 8, 9))


def test_a_run_whose_every_group_is_too_old_ends_with_what_to_do(tmp_path):
    async def work():
        attempt = Attempt(tmp_path, Service(all_old=True), staleness=1)
        with pytest.raises(RunError, match=r"trainer\.staleness"):
            await attempt.loop.run()
        return attempt

    assert run_virtually(work).loop.position.step == 3, "the first step may still learn on version 0"


def test_servers_that_say_no_version_will_do_in_synchronous_training(tmp_path):
    async def work(root, staleness: int) -> Attempt:
        attempt = Attempt(root, Service(says_versions=False), staleness=staleness)
        await attempt.loop.run()
        return attempt

    (tmp_path / "a").mkdir()
    assert len(run_virtually(lambda: work(tmp_path / "a", 0)).crew.trained) == STEPS
    with pytest.raises(RunError, match=r"without a weight version.*trainer\.staleness=0"):
        run_virtually(lambda: work(tmp_path, 1))
