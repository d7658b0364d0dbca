"""What an episode leaves on its machine: no process, however it was started, and not all that it printed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl_hpc.tasks.side.process import SideEpisode, SideError, SideServer

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def server(env: str) -> SideServer:
    return SideServer("text_environment", "", {"env": f"text_env_games:{env}"}, PATIENCE_S)


async def begin(episode: SideEpisode, **kwargs: object) -> None:
    await episode.call("begin", PATIENCE_S, kwargs=kwargs, seed=0, options={})


async def gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110  (another process's end)
            await asyncio.sleep(0.02)


async def test_a_daemon_ends_with_its_episode_and_no_other() -> None:
    games = server("Daemon")
    async with games.episode() as first:
        await begin(first)
        other = int((await first.call("step", PATIENCE_S, action="go"))["text"])
        async with games.episode() as second:
            await begin(second)
            daemon = int((await second.call("step", PATIENCE_S, action="go"))["text"])
            assert Path(f"/proc/{daemon}").exists()
        await gone(daemon)
        assert Path(f"/proc/{other}").exists()
    await gone(other)


async def test_a_daemon_ends_with_an_episode_that_broke() -> None:
    async with server("Daemon").episode() as episode:
        await begin(episode)
        daemon = int((await episode.call("step", PATIENCE_S, action="go"))["text"])
        with pytest.raises(SideError, match="exit code 3"):
            await episode.call("step", PATIENCE_S, action="exit")
        await gone(daemon)  # before anybody leaves the episode


async def test_the_end_of_what_an_episode_prints_is_kept() -> None:
    async with server("Chatter").episode() as episode:
        await begin(episode)
        log = episode._log
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(4):
                await episode.call("step", PATIENCE_S, action="go")  # prints 4 MiB
            while log.stat().st_size > 1 << 20:  # noqa: ASYNC110  (another process's doing)
                await asyncio.sleep(0.02)
        with pytest.raises(SideError, match="last words"):
            await episode.call("step", PATIENCE_S, action="exit")
    assert not log.exists()
