"""The journal goes from one attempt's coordinator to the next one's."""

from __future__ import annotations

from pathlib import Path

import pytest

import prorl_hpc.rollout.__main__ as coordinator
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_database import JournalInUse


async def opened(path: Path, attempt: int) -> Journal:
    return await Journal.open(path, epoch="one", attempt=attempt, store=None)


async def test_a_new_attempt_waits_for_the_old_one_to_give_up_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "journal.sqlite", list[str]()
    monkeypatch.setattr(coordinator, "HAND_OVER_LOOK_S", 0.0)
    old = await opened(path, 1)
    tries = 0

    async def open_journal() -> Journal:
        nonlocal tries
        tries += 1
        if tries == 2:
            await old.close(goes_on=True)
        return await opened(path, 2)

    journal = await coordinator.when_given_up(open_journal, 2, said.append)
    assert said == ["waiting for attempt 1 to give up the journal"]
    await journal.close()


async def test_a_rival_of_the_same_attempt_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    held = await opened(path, 2)
    with pytest.raises(JournalInUse, match="in use by process"):
        await coordinator.when_given_up(lambda: opened(path, 2), 2, print)
    await held.close()


async def test_the_wait_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    monkeypatch.setattr(coordinator, "HAND_OVER_S", -1.0)
    held = await opened(path, 1)
    with pytest.raises(JournalInUse):
        await coordinator.when_given_up(lambda: opened(path, 2), 2, print)
    await held.close()
