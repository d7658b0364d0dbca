"""Whether prompts can be read, and the images of sandboxes that they ask for are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.agents.outside import can_be_told, parse_bind, told_problem
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.resolving import check
from prorl_hpc.sandbox.images.sif import this_architecture
from prorl_hpc.tasks.dataset import Row, Split, load_rows
from prorl_hpc.tasks.protocol import needs_of, problems_of
from prorl_hpc.tasks.registry import get_handler

_SHOWN_IMAGES = 3


def data_problems(config: ProrlConfig) -> Iterator[str]:
    """Each as a sentence with its cure."""
    splits: list[Split] = ["train", "heldout"] if config.trainer.enabled else ["train"]
    told: dict[str, None] = dict.fromkeys(_of_the_task(config))
    images = {config.sandbox.image: "sandbox.image"}
    if config.agent.kind == "outside":
        yield from _outside_agent(config)
        if config.agent.image:
            images[config.agent.image] = "agent.image"
    for split in splits:
        try:
            images = {**_images_asked_for(config, split, load_rows(config.task, split)), **images}
        except ConfigError as error:
            told[str(error)] = None
    yield from told
    if config.sandbox.kind != "local":
        yield from _images(config, images)


def _of_the_task(config: ProrlConfig) -> Iterator[str]:
    """What the task itself finds wrong before a launch, such as an environment that does not start."""
    try:
        yield from problems_of(get_handler(config.task.name, config.task))
    except ConfigError as error:
        yield str(error)


def _outside_agent(config: ProrlConfig) -> Iterator[str]:
    try:
        handler = get_handler(config.task.name, config.task)
    except ConfigError:
        return  # whoever reads the rows says so
    if not can_be_told(handler):
        yield told_problem(config.task.name)
    if config.cluster.kind == "local":
        for path, _ in map(parse_bind, config.agent.binds):
            if not Path(path).is_dir():
                yield f"agent.binds: there is no directory {path} on this machine: make it, or name another one"


def _images_asked_for(config: ProrlConfig, split: Split, rows: list[Row]) -> dict[str, str]:
    """Image → who asks for it, for the rows that ask for one of their own."""
    handler = get_handler(config.task.name, config.task)
    asked: dict[str, str] = {}
    for row in rows:
        try:
            needs = needs_of(handler, row)
        except Exception as error:  # the task's own code
            raise ConfigError(
                f"task.{split}: {config.task.name} cannot say what row {row['id']} needs of its sandbox: "
                f"{type(error).__name__}: {error}"
            ) from error
        if needs.image:
            asked.setdefault(needs.image, f"task.{split}, row {row['id']}")
    return asked


def _images(config: ProrlConfig, images: dict[str, str]) -> Iterator[str]:
    architecture = this_architecture() if config.cluster.kind == "local" else ""
    wrong = []
    for image, who in images.items():
        try:
            check(image, architecture)
        except SandboxError as error:
            wrong.append(f"{who}: {error}")
    yield from wrong[:_SHOWN_IMAGES]
    if len(wrong) > _SHOWN_IMAGES:
        yield (
            f"{len(wrong) - _SHOWN_IMAGES} more images of {len(images)} cannot be used: `prorl-hpc image convert LIST` "
            "brings in many at a time"
        )
