"""The coordinator process: ``python -m prorl_hpc.rollout --run-dir DIR --name coordinator``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from prorl_hpc.config.policies import models_of, outside_of, policy_names
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import AgentToCoordinator
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process, favour_the_loop, process_arguments, stop_event
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout.coordinator import Coordinator
from prorl_hpc.rollout.epoch import epoch_token
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_database import JournalInUse
from prorl_hpc.rollout.journal_shelf import ShelfLimits
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.rollout.outside_servers import API_KEY, configured_servers, join_at_start
from prorl_hpc.rollout.served_models import ServedModels
from prorl_hpc.service.server import HttpFace
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.tasks.registry import BUILT_IN
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger(__name__)

HAND_OVER_S, HAND_OVER_LOOK_S = 120.0, 2.0
"""How long the coordinator of a new attempt waits for that of an earlier one to give up the journal."""
DRAIN = signal.SIGUSR1
"""Start no rollout any more: the attempt is about to end."""


async def serve(process: Process) -> None:
    """Until SIGTERM or SIGINT; DRAIN may come before."""
    stop, drain = stop_event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(DRAIN, drain.set)
    run, config = process.run, process.config
    keys = RunKeys.load(run.keys)
    plan = read_json(run.plan_file, Plan)
    if plan is None:
        raise RunError(f"{run.plan_file} is missing: a run directory that `launch` or `resume` made has one")
    address = node_address(config.cluster.interface)
    process.say(Phase.STARTING, "reading the journal")
    store = RolloutStore(run) if config.rollout.keep_trajectories else None
    epoch, attempt = epoch_token(run), run.attempt
    own_trainer = any(planned.role == "trainer" for planned in plan.processes)
    keepsakes = Keepsakes(run.keepsakes_file, epoch, attempt, own_trainer=own_trainer)
    limits = ShelfLimits(kept_batches=ShelfLimits.kept_batches + 2 * config.trainer.checkpoint_every)

    def open_journal() -> Awaitable[Journal]:
        return Journal.open(run.journal_file, epoch=epoch, attempt=attempt, store=store, limits=limits)

    journal = await when_given_up(open_journal, attempt, lambda detail: process.say(Phase.STARTING, detail))
    door: RouterDoor[AgentToCoordinator] = RouterDoor(
        AgentToCoordinator, keys, process.runtime_dir / "coordinator.zmq", None if plan.single_node else address
    )
    try:
        coordinator = Coordinator(
            run.run_id,
            config.rollout,
            door,
            journal,
            keepsakes,
            status_file=run.status_file,
            drained_marker=run.drained_marker,
            tasks=sorted({*BUILT_IN, config.task.name}),
            choice=PolicyChoice(policy_names(config), config.rollout.policy_weights, config.run.seed),
            served=ServedModels(
                {policy: Path(model.path) for policy, model in models_of(config).items() if model.path}
            ),
            first_server_s=config.run.start_timeout_s,
            outside_turn_s=config.engine.outside_turn_s,
        )
        await coordinator.resume()
        api_key = os.environ.get(API_KEY, "")
        outside = [
            server
            for policy, urls in outside_of(config).items()
            for server in configured_servers(urls, api_key, policy)
        ]
        await join_at_start(outside, coordinator.add_server, lambda detail: process.say(Phase.STARTING, detail))
        favour_the_loop()
        socket_path = process.runtime_dir / "coordinator.http"
        tcp_host = address if config.rollout.http_tcp else None
        async with HttpFace(
            coordinator,
            socket_path,
            tcp_host=tcp_host,
            tcp_ports=[port] if (port := config.rollout.http_port) else [keepsakes.http_port, 0],
            token=keys.api_token,
            process_timeout_s=config.rollout.total_s,
            own_task=config.task.name,
        ) as face:
            if face.url:
                keepsakes.listens(urlsplit(face.url).port or 0)
            endpoints = {"zmq_ipc": door.ipc, "zmq_tcp": door.tcp, "uds": str(socket_path), "http": face.url}
            process.ready({kind: where for kind, where in endpoints.items() if where})
            if run.stop_marker.exists():  # the signal may have come before there was somebody to hear it
                drain.set()
            await coordinator.run(stop, drain=drain)
            process.say(Phase.STOPPING)
    finally:
        door.close()
        await journal.close(goes_on=not run.finished_marker.exists())


async def when_given_up(
    open_journal: Callable[[], Awaitable[Journal]], attempt: int, say: Callable[[str], None]
) -> Journal:
    """The journal, as soon as an earlier attempt's coordinator has given it up: on a node that was lost it may still be
    ending, and a file server keeps the lock of one that is gone for a while. Raises JournalInUse after HAND_OVER_S, and
    at once for a rival in this attempt."""
    deadline = time.monotonic() + HAND_OVER_S
    while True:
        try:
            return await open_journal()
        except JournalInUse as error:
            if not 0 < error.attempt < attempt or time.monotonic() > deadline:
                raise
            say(f"waiting for attempt {error.attempt} to give up the journal")
            log.warning("%s; it is of attempt %d: trying again", error, error.attempt)
            await asyncio.sleep(HAND_OVER_LOOK_S)


def main() -> int:
    signal.signal(DRAIN, signal.SIG_IGN)  # until there is something to drain
    arguments = process_arguments("rollout")
    state_file = RunDirectory(arguments.run_dir).process_state(arguments.name)
    before = read_json(state_file, ProcessState)
    process = Process.start("coordinator", arguments.run_dir, arguments.name)
    try:
        asyncio.run(serve(process))
    except* Exception as group:
        for error in _leaves(group):
            log.error("the coordinator cannot go on: %s", error, exc_info=not isinstance(error, ProrlError) and error)
        if before is not None and group.subgroup(JournalInUse) is not None:
            write_json(state_file, before)  # of the one that serves: all others find it by this file
        else:
            process.say(Phase.FAILED, "; ".join(str(error) for error in _leaves(group)))
        sys.exit(1)
    process.ended()
    return 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    nested = [_leaves(e) if isinstance(e, BaseExceptionGroup) else [e] for e in group.exceptions]
    return [error for errors in nested for error in errors]


if __name__ == "__main__":
    sys.exit(main())
