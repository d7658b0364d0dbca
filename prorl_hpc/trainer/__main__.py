"""``python -m prorl_hpc.trainer --run-dir DIR --name NAME --rank R --world W``: one trainer rank. Under srun the last three are
those of the task where they are not given."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from prorl_hpc.config.model_directory import check_model_dir
from prorl_hpc.config.trainer_files import checkpoint_problems, trainer_problems
from prorl_hpc.messages.errors import ConfigError, ProrlError
from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.process import START_TOKEN, Process, exit_at_once, process_arguments
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.trainer.ranks import on_one_node, with_slurm_rank
from prorl_hpc.trainer.stopping import Stopped, StopSignal
from prorl_hpc.transport.addresses import node_address

log = logging.getLogger(__name__)


ENVIRONMENT = {
    # Threads that wait must not take the cores that engines and sandboxes need.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Read when torch and transformers are loaded, so set before."""


def main() -> int:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.argv[1:] = with_slurm_rank(sys.argv[1:], os.environ)
    arguments = process_arguments("trainer")
    process = Process.start("trainer", arguments.run_dir, arguments.name)
    supervised = START_TOKEN in os.environ
    stop = StopSignal()
    stop.install(process.ended)
    try:
        check(process)
        if arguments.rank == 0:
            asyncio.run(lead(process, stop, arguments.world))
        else:
            _follow(process, stop, arguments.rank, arguments.world)
    except Stopped:
        log.info("stopped as asked, %s", stop.when)
    except ProrlError as error:
        log.error("%s", error)
        process.say(Phase.FAILED, str(error))
        return 1
    except BaseException as error:
        if supervised and arguments.world > 1 and _lost_another(process, stop, error):
            process.ended()
            return 0
        process.say(Phase.FAILED, f"{type(error).__name__}: {error}")
        raise
    process.ended()
    return 0


def check(process: Process) -> None:
    """What launch checks too, for those who start a trainer otherwise."""
    config = process.config
    if config.trainer.top_p != 1.0:
        raise ConfigError(
            f"trainer.top_p={config.trainer.top_p}: engine logprobs would be those of a truncated distribution, which the "
            "policy gradient does not train; set 1.0"
        )
    try:
        check_model_dir(Path(config.model.path))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problems := [*trainer_problems(config), *checkpoint_problems(config, process.run.checkpoints)]:
        raise ConfigError("; ".join(problems))


async def lead(process: Process, stop: StopSignal, world: int) -> None:
    """Rank 0: load the model while the engines start, then train."""
    from prorl_hpc.service.client import RolloutClient
    from prorl_hpc.tasks.dataset import load_rows
    from prorl_hpc.trainer.crew import Crew, Rank
    from prorl_hpc.trainer.loop import TrainingLoop
    from prorl_hpc.trainer.metric_writers import open_writers
    from prorl_hpc.trainer.publish import probe_tokens
    from prorl_hpc.trainer.publisher import make_publisher

    config, run = process.config, process.run
    process.say(Phase.STARTING, "loading the model")
    train_rows, heldout_rows = load_rows(config.task, "train"), load_rows(config.task, "heldout")
    crew = Crew()
    rank = await crew.load(lambda: Rank(config, run, stop, rank=0, world=world, host=_host(process)))
    publisher = make_publisher(
        config.trainer.publish,
        crew,
        run,
        host=_host(process),
        single_node=make_plan(config).single_node,
        weight_bytes=rank.engine.weight_bytes,
    )
    stop.loaded()
    process.ready(detail="training")
    try:
        await stop.guard(process.wait_for("coordinator", config.run.start_timeout_s))
        # So long: a coordinator may be started again, and at the beginning servers and workers may still be coming.
        async with RolloutClient.for_run(process, patience_s=config.run.start_timeout_s) as client:
            with open_writers(config, run) as writers:
                loop = TrainingLoop(
                    config,
                    run,
                    client,
                    crew,
                    stop,
                    publisher,
                    writers,
                    train_rows=train_rows,
                    heldout_rows=heldout_rows,
                    probe_ids=probe_tokens(Path(config.model.path)),
                    position=rank.position,
                )
                await loop.run()
        await crew.close()
        run.finished_marker.write_text(f"{config.trainer.steps} steps\n")
    except Stopped:
        await crew.close()
        raise
    finally:
        publisher.close()


def _follow(process: Process, stop: StopSignal, rank: int, world: int) -> None:
    from prorl_hpc.trainer.crew import Rank, follow

    process.say(Phase.STARTING, "loading the model")
    member = Rank(process.config, process.run, stop, rank=rank, world=world, host=_host(process))
    stop.loaded()
    process.ready(detail="training")
    follow(member)


def _lost_another(process: Process, stop: StopSignal, error: BaseException) -> bool:
    """Whether ``error`` says only that another rank is gone, and this one has been told to end since."""
    from prorl_hpc.trainer.lost_ranks import another_is_lost, told_to_end

    return another_is_lost(error) and told_to_end(process, stop, error)


def _host(process: Process) -> str:
    single = on_one_node(make_plan(process.config).single_node, os.environ)
    return "127.0.0.1" if single else node_address(process.config.cluster.interface)


if __name__ == "__main__":
    exit_at_once(main())
