from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from journal_run import RAW, batch, ended, finished, open_journal

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.rollout import journal_shelving
from prorl_hpc.rollout.journal_database import Database
from prorl_hpc.rollout.journal_records import OpenBatch

CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from journal_run import RAW, batch, ended, finished, open_journal
from prorl_hpc.rollout.journal_shelf import ShelfLimits

async def note(what, future):
    await future
    print(what, flush=True)

async def main():
    journal = await open_journal(Path(sys.argv[1]), limits=ShelfLimits(file_rollouts=16))
    first = journal.newest_cursor
    print("open", flush=True)
    for n in range(first, 10**6):
        name = f"b{n}"
        await journal.accept_batch(batch(name))
        rollouts = [ended(f"{name}.g0.s{s}") for s in range(3)]
        works = [note(r.rollout_id, journal.record(r, RAW, name)) for r in rollouts]
        works += [note(f"x{n}-{i}", journal.record(ended(f"x{n}-{i}"), RAW, "")) for i in range(3)]
        await asyncio.gather(*works)
        if n % 2:
            await journal.finish_batch(finished(name, {0: rollouts}), keeps_open=False)

asyncio.run(main())
"""


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(directory), str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    return child


async def test_what_was_said_to_be_on_disk_is_there_once_after_a_kill(tmp_path: Path) -> None:
    said: list[str] = []
    for lines in (90, 301, 40):
        child = start(tmp_path)
        assert child.stdout is not None
        said += [child.stdout.readline().strip() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        said += [line.strip() for line in child.stdout if line.endswith("\n")]
        child.wait()
    (tmp_path / "rollouts").mkdir(exist_ok=True)
    (tmp_path / "rollouts" / ".rollouts-torn.part").write_bytes(b"PAR1 torn")
    journal = await open_journal(tmp_path)
    recorded: list[str] = []
    cursors: list[int] = []
    while page := await journal.results(cursors[-1] if cursors else 0, 500, ""):
        recorded += [numbered.result.rollout_id for numbered in page]
        cursors += [numbered.cursor for numbered in page]
        assert all(numbered.result.trajectory.num_tokens == 5 for numbered in page)
    assert len(recorded) == len(set(recorded)) and cursors == sorted(cursors)
    # In the order in which it was said, and perhaps some that nobody was told of.
    there = set(said)
    assert len(said) == len(there) and [name for name in recorded if name in there] == said
    orders, _ = await journal.recover()
    in_open = {r.rollout_id for order in orders if isinstance(order, OpenBatch) for r in order.log if r}
    assert in_open <= set(recorded)
    await journal.close()
    in_parquet = read_rollouts(RunDirectory(tmp_path), ["rollout_id"])["rollout_id"].to_pylist()
    assert sorted(in_parquet) == sorted(recorded)
    assert not list((tmp_path / "rollouts").glob(".*"))


async def test_another_process_is_refused_while_one_has_it(tmp_path: Path) -> None:
    child = start(tmp_path)
    try:
        with pytest.raises(RunError, match=f"in use by process {child.pid} on .* since 20"):
            await open_journal(tmp_path)
    finally:
        child.kill()
        child.communicate()
    journal = await open_journal(tmp_path)
    await journal.close()


async def test_a_file_that_was_not_noted_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journal_shelving.note_places

    def power_cut(db: Database, file: int, places: object, order: int | None) -> None:
        if (order is None) == cut_singles:
            raise OSError("power cut")
        real(db, file, places, order)  # type: ignore[arg-type]

    monkeypatch.setattr(journal_shelving, "note_places", power_cut)
    cut_singles = False
    journal = await open_journal(tmp_path)
    await journal.accept_batch(batch("b"))
    await journal.accept_batch(batch("goes-on"))
    rollouts = [ended("b.g0.s0"), ended("b.g0.s1")]
    for rollout in rollouts:
        await journal.record(rollout, RAW, "b")
    await journal.record(ended("x"), RAW, "")
    await journal.record(ended("goes-on.g0.s0"), RAW, "goes-on")
    await journal.finish_batch(finished("b", {0: rollouts}), keeps_open=False)
    assert "power cut" in str(await journal.failed)
    await journal.close()
    cut_singles = True
    journal = await open_journal(tmp_path)
    await journal.close()
    assert "power cut" in str(await journal.failed)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["b.parquet", "single-3.parquet"]

    monkeypatch.setattr(journal_shelving, "note_places", real)
    journal = await open_journal(tmp_path)
    # Goes into its batch's file now, as if there had been no other.
    await journal.finish_batch(finished("goes-on", {0: [ended("goes-on.g0.s0")]}), keeps_open=False)
    await journal.close()
    rows = read_rollouts(RunDirectory(tmp_path), ["rollout_id"])["rollout_id"].to_pylist()
    assert rows == ["b.g0.s0", "b.g0.s1", "goes-on.g0.s0", "x"]
