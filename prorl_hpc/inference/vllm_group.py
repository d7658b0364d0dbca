"""The processes of a vLLM server that is spread over several nodes: see ``server_group``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prorl_hpc.inference.server_group import Announcement, MemberReport, MemberWatch, ServerGroup
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import GroupPlace, VllmSettings
from prorl_hpc.messages.errors import InferenceError

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_BEATS_TO_LOOK = 20


class LeaderProcess(VllmProcess):
    """The server's own process, on the first node. It dies with any of its members, which the engine then takes for its
    death, and starts all of them again. ``address``: this node's, for the others."""

    def __init__(
        self, settings: VllmSettings, log_file: Path, group: ServerGroup, address: str, lost_after_s: float
    ) -> None:
        super().__init__(settings, log_file)
        self._group = group
        self._address = address
        self._watch = MemberWatch(lost_after_s)
        self._watching: asyncio.Task[None] | None = None
        self._lost = ""

    async def start(self, progress: Callable[[str], None]) -> None:
        ports = self.claim_ports()
        announced = self._group.announce(self._address, ports.first)
        place = GroupPlace(self._group.nodes, 0, announced.address, announced.port)
        self.settings = replace(self.settings, place=place)
        self._watching = asyncio.create_task(self._watch_members(announced, progress))
        await super().start(progress)

    async def _watch_members(self, announced: Announcement, progress: Callable[[str], None]) -> None:
        joined = 0
        while not self._lost:
            await asyncio.sleep(_LOOK_S)
            reports = self._group.reports(announced.generation)
            if len(reports) > joined:
                joined = len(reports)
                progress(f"vLLM: {joined} of {self._group.nodes - 1} further nodes have joined")
            self._lost = self._watch.dead(reports)
        log.error("killing the vLLM server: %s", self._lost)
        self.kill()

    def obituary(self, what: str) -> str:
        return f"{self._lost}; {super().obituary(what)}" if self._lost else super().obituary(what)

    async def stop(self) -> None:
        self._group.withdraw()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().stop()


class MemberProcess(VllmProcess):
    """The headless part on a further node: it has no door, and is up when it runs."""

    async def _until_healthy(self, progress: Callable[[str], None], log_offset: int) -> None:
        progress("vLLM: joining the server's first node")


class GroupMember:
    """Joins every generation of the group's server with a process on this node. ``rank``: of this node, 1 or more."""

    def __init__(self, settings: VllmSettings, log_file: Path, group: ServerGroup, rank: int) -> None:
        self._settings = settings
        self._log_file = log_file
        self._group = group
        self._rank = rank
        self._process: MemberProcess | None = None
        self._generation = ""
        self._beat = 0

    async def serve(self, progress: Callable[[str], None]) -> None:
        """For ever; ``stop`` ends the process."""
        self._disown()
        while True:
            announced = self._group.announced()
            if (announced.generation if announced is not None else "") != self._generation:
                await self.stop()
                if announced is not None:
                    await self._join(announced, progress)
            await self._tell()
            await asyncio.sleep(_LOOK_S)

    def _disown(self) -> None:
        """A generation that began before this process did has lost this member."""
        if (announced := self._group.announced()) is not None and self._group.reports(announced.generation).get(
            self._rank
        ):
            self._generation = announced.generation
            self._group.report(self._rank, MemberReport(announced.generation, 0, "its agent was started anew"))

    async def _join(self, announced: Announcement, progress: Callable[[str], None]) -> None:
        self._generation = announced.generation
        place = GroupPlace(self._group.nodes, self._rank, announced.address, announced.port)
        self._process = MemberProcess(replace(self._settings, place=place), self._log_file)
        log.info("joining generation %s of %s at %s:%d", announced.generation, self._group.leader, *place.master)
        await self._process.start(progress)

    async def _tell(self) -> None:
        if self._process is None:
            return
        self._beat += 1
        if self._beat % _BEATS_TO_LOOK == 0:
            await self._process.note_kin()
        words = "" if self._process.alive else self._process.obituary("died")
        self._group.report(self._rank, MemberReport(self._generation, self._beat, words))

    async def stop(self) -> None:
        """End this node's process, with proof."""
        self._generation = ""
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await process.stop()
            except InferenceError as error:
                log.error("%s", error)
