from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import msgspec
import pytest
from journal_run import RAW, TRAJECTORY, batch, ended, finished, open_journal, single

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import GroupOutcome
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.rollout import RolloutProgress, Status
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_records import CarriedGroup, OpenBatch, OpenRollout
from prorl_hpc.rollout.journal_shelf import ShelfLimits


async def until_shelved(journal: Journal, name: str, directory: Path) -> None:
    while not (directory / "rollouts" / name).exists():
        assert not journal.failed.done(), journal.failed.result()
        await asyncio.sleep(0.01)
    # What is noted after the file is there is in one piece of work before this one.
    for _ in range(4):
        await journal.batches("", 1)
        await asyncio.sleep(0.01)


async def test_orders_survive_in_the_order_of_acceptance(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert await journal.accept_rollouts([single("a"), single("b")]) == [True, True]
    assert await journal.accept_batch(batch("B")) is True
    assert await journal.accept_rollouts([single("c"), single("a")]) == [True, False]
    journal.note_attempt("b", 3)
    journal.note_attempt("b", 2)
    journal.note_attempt("B.g0.s1", 2)
    await journal.record(ended("a"), RAW, "")
    await journal.record(ended("B.g0.s0"), RAW, "B")
    await journal.cancelled_batch("B")
    await journal.record(ended("B.g0.s1"), None, "B")
    await journal.set_paused(True)
    await journal.close()
    journal = await open_journal(tmp_path)
    orders, paused = await journal.recover()
    await journal.close()
    log = (ended("B.g0.s0"), None, ended("B.g0.s1"))
    assert paused
    assert orders == [
        OpenRollout(single("b"), 3),
        OpenBatch(batch("B"), (), (), log, {}, "running"),
        OpenRollout(single("c"), 1),
    ]


async def test_the_same_id_is_the_same_order_or_refused(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    assert await journal.accept_batch(batch("B"))
    assert not await journal.accept_batch(batch("B"))
    with pytest.raises(ServiceError) as refused:
        await journal.accept_batch(batch("B", rows=3))
    assert (refused.value.code, refused.value.status) == ("batch_differs", 409)
    await journal.accept_rollouts([single("a"), single("x.g0.s0")])
    for specs in ([single("new"), single("a", priority=1)], [single("new"), single("B.g1.s0")]):
        with pytest.raises(ServiceError) as refused:
            await journal.accept_rollouts(specs)
        assert refused.value.code == "rollout_differs"
    with pytest.raises(ServiceError, match=r"x\.g0\.s0"):
        await journal.accept_batch(batch("x"))
    with pytest.raises(ServiceError, match="single-3"):
        await journal.accept_batch(batch("single-3"))
    assert [type(order) for order in (await journal.recover())[0]] == [OpenBatch, OpenRollout, OpenRollout]
    await journal.record(ended("a"), RAW, "")  # an order that has ended is known all the same
    assert await journal.accept_rollouts([single("a")]) == [False]
    await journal.close()


async def test_a_refusal_fails_alone(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("B"))
    answers = await asyncio.gather(
        journal.accept_batch(batch("B", rows=5)),
        journal.record(ended("a"), RAW, ""),
        journal.finish_batch(finished("unknown", {}), keeps_open=False),
        journal.accept_batch(batch("C")),
        return_exceptions=True,
    )
    assert isinstance(answers[0], ServiceError) and isinstance(answers[2], RunError)
    assert answers[1] == 1 and answers[3] is True
    await journal.close()


async def test_carried_groups_belong_to_the_batch_that_takes_them_over(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("A"))
    await journal.record(ended("A.g0.s0"), RAW, "A")
    await journal.record(ended("A.g1.s0"), RAW, "A")
    await journal.record(ended("A.g0.s1"), RAW, "A")
    result = finished("A", {0: [ended("A.g0.s0"), ended("A.g0.s1")]})
    groups = [*result.groups, *finished("A", {1: [ended("A.g1.s0")]}, GroupOutcome.CARRIED).groups]
    await journal.finish_batch(msgspec.structs.replace(result, groups=groups), keeps_open=True)
    journal.note_attempt("A.g1.s1", 2)
    (open_a,) = (await journal.recover())[0]
    assert isinstance(open_a, OpenBatch) and open_a.state == "full" and open_a.attempts == {"A.g1.s1": 2}
    assert [r.rollout_id for r in open_a.log if r] == ["A.g0.s0", "A.g1.s0", "A.g0.s1"]

    carried = CarriedGroup("A", "A.g1", 1, (single("A.g1.s0"), single("A.g1.s1")))
    await journal.accept_batch(batch("B"), [carried], closes="A")
    await journal.record(ended("A.g1.s1"), RAW, "B")
    (open_b,) = (await journal.recover())[0]
    assert open_b == OpenBatch(batch("B"), (carried,), (ended("A.g1.s0"),), (ended("A.g1.s1"),), {}, "running")
    assert [p.rollout_id for p in await journal.ended(None, "B", "", "", 9)] == ["A.g1.s0", "A.g1.s1"]
    whole = await journal.batch_result("A")
    assert whole is not None and [r.trajectory for g in whole.groups for r in g.rollouts] == [TRAJECTORY] * 3
    await journal.close()
    rows = read_rollouts(RunDirectory(tmp_path), ["rollout_id", "batch_id", "group_outcome"]).to_pylist()
    assert sorted((row["rollout_id"], row["batch_id"], row["group_outcome"]) for row in rows) == [
        ("A.g0.s0", "A", "accepted"),
        ("A.g0.s1", "A", "accepted"),
        ("A.g1.s0", "B", None),
        ("A.g1.s1", "B", None),
    ]


async def test_only_a_batch_with_a_result_can_be_closed(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("A"))
    for closes in ("A", "unknown"):
        with pytest.raises(RunError, match="cannot be closed"):
            await journal.accept_batch(batch("B"), closes=closes)
    assert await journal.batches("", 9) == ["A"]
    await journal.close()


async def test_results_are_the_same_from_the_journal_and_from_parquet(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("B"))
    rollouts = [ended("B.g0.s0"), ended("B.g0.s1", Status.FAILED)]
    await journal.record(rollouts[1], None, "B")
    await journal.record(rollouts[0], RAW, "B")
    assert await journal.batch_result("B") is None and await journal.batch_state("B") is None
    result = finished("B", {0: rollouts})
    early = await journal.results(0, 9, "B")
    await journal.finish_batch(result, keeps_open=False)
    await until_shelved(journal, "B.parquet", tmp_path)
    assert await journal.results(0, 9, "B") == early
    assert [(n.cursor, n.result.trajectory) for n in early] == [(1, Trajectory()), (2, TRAJECTORY)]
    assert await journal.batch_state("B") == result.progress
    full = await journal.batch_result("B")
    assert full is not None and full.elapsed_s == 1.5
    assert full.groups[0].rollouts == [msgspec.structs.replace(rollouts[0], trajectory=TRAJECTORY), rollouts[1]]
    assert await journal.rollout_result("B.g0.s0") == full.groups[0].rollouts[0]
    assert await journal.rollout_result("B.g1.s0") is None
    await journal.close()


async def test_lists_and_pages(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    for name in ("C", "A", "B"):
        await journal.accept_batch(batch(name))
    await journal.record(ended("s0"), RAW, "")
    await journal.record(ended("A.g0.s0", Status.FAILED), RAW, "A")
    await journal.record(ended("s1", Status.FAILED), RAW, "")
    assert await journal.batches("", 2) == ["C", "A"] and await journal.batches("A", 9) == ["B"]
    ids = [p.rollout_id for p in await journal.ended(Status.FAILED, "", "", "", 9)]
    assert ids == ["A.g0.s0", "s1"]
    assert await journal.ended(None, "", "", "A.g0.s0", 9) == [RolloutProgress("s1", Status.FAILED, 1, "w-0", "", "")]
    assert await journal.rollout_progress("A.g0.s0") == RolloutProgress("A.g0.s0", Status.FAILED, 1, "w-0", "", "A")
    assert await journal.rollout_progress("s9") is None
    assert [n.cursor for n in await journal.results(1, 1, "")] == [2]
    assert [n.cursor for n in await journal.results(0, 9, "A")] == [2]
    for listing in (journal.batches("nobody", 9), journal.ended(None, "", "", "nobody", 9)):
        with pytest.raises(ServiceError) as refused:
            await listing
        assert refused.value.status == 404
    await journal.close()


async def test_a_result_recorded_twice_stays_the_first(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    first = journal.record(ended("a"), RAW, "")
    again = journal.record(ended("a", Status.FAILED), None, "")
    assert await first == await again == 1
    assert await journal.record(ended("a", Status.FAILED), None, "") == 1
    assert [p.status for p in await journal.ended(None, "", "", "", 9)] == [Status.DONE]
    await journal.close()


async def test_waiting_for_the_next_result(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.wait_beyond(0, 0.01)
    assert journal.newest_cursor == 0
    waiting = asyncio.create_task(journal.wait_beyond(1, 60))
    await journal.record(ended("a"), RAW, "")
    assert journal.newest_cursor == 1
    await asyncio.sleep(0)
    assert not waiting.done()
    await journal.record(ended("b"), RAW, "")
    await waiting
    await journal.close()


async def test_single_rollouts_go_to_parquet_by_number_and_at_the_end(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path, limits=ShelfLimits(file_rollouts=4))
    for i in range(4):
        await journal.record(ended(f"r{i}"), RAW, "")
    await until_shelved(journal, "single-1.parquet", tmp_path)
    await journal.record(ended("r4"), msgspec.Raw(RAW), "")
    await journal.close()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["single-1.parquet", "single-5.parquet"]
    table = read_rollouts(RunDirectory(tmp_path))
    assert table["rollout_id"].to_pylist() == [f"r{i}" for i in range(5)]
    assert table["cursor"].to_pylist() == [1, 2, 3, 4, 5]
    assert table["batch_elapsed_s"].null_count == table["group_outcome"].null_count == 5


async def test_idle_single_rollouts_go_to_parquet(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path, limits=ShelfLimits(idle_s=0.05))
    await journal.record(ended("a"), RAW, "")
    await until_shelved(journal, "single-1.parquet", tmp_path)
    await journal.close()


async def test_a_new_epoch_begins_with_nothing(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path, "epoch-1")
    await journal.accept_rollouts([single("a")])
    await journal.accept_batch(batch("done"))
    await journal.accept_batch(batch("half"))
    await journal.record(ended("done.g0.s0"), RAW, "done")
    await journal.record(ended("half.g0.s0"), RAW, "half")
    await journal.finish_batch(finished("done", {0: [ended("done.g0.s0")]}), keeps_open=False)
    await journal.set_paused(True)
    await journal.close()

    journal = await open_journal(tmp_path, "epoch-2")
    assert await journal.recover() == ([], False)
    assert journal.newest_cursor == 2 and await journal.batches("", 9) == []
    assert await journal.accept_rollouts([single("a", priority=9)]) == [True]
    assert await journal.accept_batch(batch("done", rows=3))
    assert await journal.record(ended("done.g0.s0", Status.FAILED), RAW, "done") == 3
    assert [n.cursor for n in await journal.results(0, 9, "")] == [3]
    again = finished("done", {0: [ended("done.g0.s0", Status.FAILED)]})
    await journal.finish_batch(again, keeps_open=False)
    await journal.close()
    files = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert files == ["done.parquet", "done~1.parquet", "single-2.parquet"]
    rows = read_rollouts(RunDirectory(tmp_path), ["rollout_id", "status"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("done.g0.s0", "failed"),
        ("done.g0.s0", "done"),
        ("half.g0.s0", "done"),
    ]


async def test_without_parquet_only_the_newest_trajectories_are_kept(tmp_path: Path) -> None:
    limits = ShelfLimits(kept_batches=1, kept_singles=2, idle_s=0.02)
    journal = await open_journal(tmp_path, keep=False, limits=limits)
    for i in range(4):
        await journal.record(ended(f"r{i}"), RAW, "")
    for name in ("A", "B"):
        await journal.accept_batch(batch(name))
        await journal.record(ended(f"{name}.g0.s0"), RAW, name)
        await journal.finish_batch(finished(name, {0: [ended(f"{name}.g0.s0")]}), keeps_open=False)

    async def kept(name: str) -> bool:
        try:
            result = await journal.rollout_result(name)
        except ServiceError as error:
            assert (error.code, error.status) == ("result_gone", 410) and "rollout.keep_trajectories" in str(error)
            return False
        assert result is not None and result.trajectory == TRAJECTORY
        return True

    while await kept("r1") or await kept("A.g0.s0"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not await kept("r0") and await kept("r2") and await kept("r3") and await kept("B.g0.s0")
    with pytest.raises(ServiceError, match="keep_trajectories"):
        await journal.batch_result("A")
    progress = await journal.rollout_progress("r0")
    assert progress is not None and progress.status is Status.DONE
    assert not (tmp_path / "rollouts").exists()
    await journal.close()


async def test_the_file_is_private_and_its_pages_are_used_again(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    file = tmp_path / "journal.sqlite"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    large = msgspec.msgpack.encode(
        Trajectory([TRAJECTORY.segments[0]], [msgspec.structs.replace(TRAJECTORY.messages[0], content="x" * 200_000)])
    )
    for i in range(12):
        await journal.accept_batch(batch(f"b{i}"))
        rollouts = [ended(f"b{i}.g0.s{s}") for s in range(20)]
        await asyncio.gather(*(journal.record(rollout, large, f"b{i}") for rollout in rollouts))
        await journal.finish_batch(finished(f"b{i}", {0: rollouts}), keeps_open=False)
        await until_shelved(journal, f"b{i}.parquet", tmp_path)
    await journal.close()
    assert file.stat().st_size < 3 * 20 * len(large)
    assert not file.with_name("journal.sqlite-wal").exists()


async def test_a_full_disk_fails_everybody_who_waits(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.record(ended("before"), RAW, "")
    await journal._thread.call(lambda db: db.execute("PRAGMA max_page_count = 20").fetchall(), writes=False)
    waiting = asyncio.create_task(journal.wait_beyond(1, 60))
    futures = [journal.record(ended(f"r{i}"), bytes(100_000), "") for i in range(8)]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(answer, RunError) and "full" in str(answer) for answer in answers)
    assert "Free space" in str(await journal.failed)
    with pytest.raises(RunError):
        await waiting
    with pytest.raises(RunError):
        await journal.accept_batch(batch("B"))
    await journal.close()
    journal = await open_journal(tmp_path)
    assert [n.result.rollout_id for n in await journal.results(0, 9, "")] == ["before"]
    await journal.close()


async def test_parquet_that_cannot_be_written_fails_the_journal(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("B"))
    await journal.record(ended("B.g0.s0"), RAW, "B")
    await journal.finish_batch(finished("B", {0: [ended("B.g0.s0")]}), keeps_open=False)
    assert "keep_trajectories=false" in str(await journal.failed)
    await journal.close()


async def test_bytes_that_are_no_trajectory_do_not_hold_up_the_others(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.record(ended("bad"), b"\xc1 no msgpack", "")
    await journal.record(ended("deep"), b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", "")
    too_large = msgspec.msgpack.encode({"segments": [{"token_ids": [2**40]}]})
    await journal.record(ended("large"), too_large, "")
    await journal.record(ended("good"), RAW, "")
    results = [numbered.result.trajectory for numbered in await journal.results(0, 9, "")]
    assert results == [Trajectory(), Trajectory(), Trajectory(), TRAJECTORY]
    await journal.close()
    assert read_rollouts(RunDirectory(tmp_path))["token_ids"].to_pylist() == [[], [], [], [1, 2, 3, 4, 5]]


async def test_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"something else " * 1000)
    with pytest.raises(RunError, match="cannot be opened"):
        await open_journal(tmp_path)
    (tmp_path / "journal.sqlite").unlink()
    journal = await open_journal(tmp_path)
    await journal._thread.call(lambda db: db.execute("PRAGMA user_version = 99") and None)
    await journal.close()
    with pytest.raises(RunError, match="newer"):
        await open_journal(tmp_path)


async def test_a_damaged_journal_says_what_to_do(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    await journal.record(ended("a"), RAW, "")
    await journal.close()
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(RunError, match="It is damaged: move it"):
        await open_journal(tmp_path)


@pytest.mark.parametrize(("damage", "code", "status"), [(None, "result_gone", 410), (b"x", "result_unreadable", 500)])
async def test_a_rollout_file_that_is_gone_or_damaged_is_named(
    tmp_path: Path, damage: bytes | None, code: str, status: int
) -> None:
    journal = await open_journal(tmp_path)
    await journal.record(ended("a"), RAW, "")
    await journal.close()
    (file,) = RunDirectory(tmp_path).rollouts.glob("*.parquet")
    file.unlink()
    if damage is not None:
        file.write_bytes(damage)
    journal = await open_journal(tmp_path)
    for read in (journal.results(0, 9, ""), journal.rollout_result("a")):
        with pytest.raises(ServiceError, match=file.name) as refused:
            await read
        assert (refused.value.code, refused.value.status) == (code, status)
    await journal.close()


async def test_a_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path)
    with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
        await open_journal(tmp_path)
    await journal.record(ended("a"), RAW, "")
    await journal.close()
    await journal.close()
    with pytest.raises(RunError, match="closed"):
        await journal.accept_batch(batch("late"))
