"""The journal over the attempts of a run: orders stay open, what was cut off is known as such."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

from journal_run import RAW, batch, ended, finished, open_journal, single

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.core.events import Unfinished
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.rollout.epoch import begin_new_epoch, epoch_token
from prorl_hpc.rollout.journal_records import OpenBatch, OpenRollout
from prorl_hpc.rollout.keepsakes import Keepsakes


async def test_orders_are_open_in_the_next_attempt_and_what_was_cut_off_is_noted(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert not journal.cut_off
    await journal.accept_batch(batch("B"))
    await journal.accept_rollouts([single("a")])
    journal.note_attempt("a", 2)
    await journal.record(ended("B.g0.s0"), RAW, "B")
    await journal.close(goes_on=True)

    for opened in range(2):  # killed before it had begun: nothing was changed
        journal = await open_journal(tmp_path, attempt=2)
        assert journal.cut_off
        log = (ended("B.g0.s0"),)
        assert (await journal.recover())[0] == [
            OpenBatch(batch("B"), (), (), log, {}, "running"),
            OpenRollout(single("a"), 2),
        ]
        if opened:
            left = [Unfinished(single("B.g0.s1"), 2, 1), Unfinished(single("a"), 3, 1)]
            await journal.begin_attempt(left, ["B"])
            assert not journal.cut_off
        await journal.close(goes_on=True)

    journal = await open_journal(tmp_path, attempt=2)  # started again within the attempt
    assert not journal.cut_off
    found = [OpenBatch(batch("B"), (), (), log, {"B.g0.s1": 2}, "running", {"B.g0.s1": 1}, True)]
    assert (await journal.recover())[0] == [*found, OpenRollout(single("a"), 3, 1)]
    await journal.woken("B")
    journal.note_attempt("a", 4, 1)
    orders = (await journal.recover())[0]
    assert isinstance(orders[0], OpenBatch) and not orders[0].asleep
    assert orders[1] == OpenRollout(single("a"), 4, 1)
    assert await journal.ended_counts() == {Status.DONE: 1}
    await journal.close()


async def test_results_of_an_open_batch_wait_for_the_batchs_own_file(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("B"))
    await journal.record(ended("B.g0.s0"), RAW, "B")
    await journal.record(ended("alone"), RAW, "")
    await journal.close(goes_on=True)
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["single-2.parquet"]
    journal = await open_journal(tmp_path, attempt=2)
    await journal.record(ended("B.g0.s1"), RAW, "B")
    await journal.finish_batch(finished("B", {0: [ended("B.g0.s0"), ended("B.g0.s1")]}), keeps_open=False)
    await journal.close(goes_on=True)
    rows = read_rollouts(RunDirectory(tmp_path), ["rollout_id", "group_outcome"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("B.g0.s0", "accepted"),
        ("B.g0.s1", "accepted"),
        ("alone", None),
    ]


async def test_a_journal_of_the_first_version_is_gone_on_with(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("B"))
    journal.note_attempt("B.g0.s1", 2)
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        since = (("epochs", "attempt"), ("orders", "asleep"), ("attempts", "spared"), ("results", "policy"))
        for table, column in since:
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        database.execute("PRAGMA user_version = 1")
    database.close()
    journal = await open_journal(tmp_path)
    assert journal.cut_off, "it did not say whose it is"
    orders = (await journal.recover())[0]
    assert orders == [OpenBatch(batch("B"), (), (), (), {"B.g0.s1": 2}, "running")]
    await journal.begin_attempt([Unfinished(single("B.g0.s1"), 3, 1)], [])
    await journal.close()


async def test_results_of_the_second_version_are_the_trained_policys(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_rollouts([single("s")])
    await journal.record(RolloutResult("s", "", 0, "t", Status.DONE, 0.5), None, "")
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("ALTER TABLE results DROP COLUMN policy")
        database.execute("PRAGMA user_version = 2")
    database.close()
    journal = await open_journal(tmp_path)
    await journal.accept_rollouts([single("b")])
    await journal.record(RolloutResult("b", "", 0, "t", Status.DONE, 1.5, policy="base"), None, "")
    assert [p.rollout_id for p in await journal.ended(None, "", "policy", "", 9)] == ["s"]
    assert [p.policy for p in await journal.ended(None, "", "base", "", 9)] == ["base"]
    figures = (await journal.ended_figures(["policy"])).statuses({})
    assert [(f.policy, f.rollouts, f.reward) for f in figures] == [
        ("policy", {"done": 1}, 0.5),
        ("base", {"done": 1}, 1.5),
    ]
    await journal.close()


def test_the_epoch_is_the_runs_until_a_new_one_is_begun(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = epoch_token(run)
    assert epoch_token(run) == first and len(first) == 32
    begin_new_epoch(run)
    assert epoch_token(run) != first
    assert [p.name for p in tmp_path.iterdir()] == ["epoch"]
    assert stat.S_IMODE(run.epoch_file.stat().st_mode) == 0o600


UPDATE = WeightUpdate(7, ["/w/7"])
OUTSIDE = OutsideServer("o", "http://o:1/v1")


def test_keepsakes_over_attempts(tmp_path: Path) -> None:
    path = tmp_path / "keepsakes.json"
    kept = Keepsakes(path, "e", 1)
    kept.listens(4000)
    kept.add_outside(OUTSIDE)
    kept.published(UPDATE)
    assert Keepsakes(path, "e", 1).weights == {"policy": UPDATE}, "within the attempt"

    for attempt in (2, 3):  # the second ended before anything was published
        later = Keepsakes(path, "e", attempt)
        assert (later.http_port, later.outside) == (4000, {"o": OUTSIDE})
        assert (later.weights, later.awaited) == ({}, {"policy"})
        later.listens(4000)
    older = WeightUpdate(3, ["/w/3"])
    later.published(older)
    assert later.awaited == set()
    again = Keepsakes(path, "e", 3)
    assert (again.weights, again.awaited) == ({"policy": older}, set())

    fresh = Keepsakes(path, "another", 4)
    assert (fresh.weights, fresh.awaited, fresh.outside) == ({}, set(), {"o": OUTSIDE})


def test_weights_of_a_trainer_elsewhere_go_on(tmp_path: Path) -> None:
    path = tmp_path / "keepsakes.json"
    Keepsakes(path, "e", 1, own_trainer=False).published(UPDATE)
    later = Keepsakes(path, "e", 2, own_trainer=False)
    assert (later.weights, later.awaited) == ({"policy": UPDATE}, set())
