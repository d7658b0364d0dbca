"""Whether prompts can be read, and the images of sandboxes that they ask for are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from prorl_hpc.agents.outside import can_be_told, parse_bind, told_problem
from prorl_hpc.config.held_out import held_out_rows, holds_out, told_held_out
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.resolving import HOST_IMAGE, check
from prorl_hpc.sandbox.images.sif import this_architecture
from prorl_hpc.tasks.dataset import Row, Split, load_rows, read_rows
from prorl_hpc.tasks.protocol import needs_of, problems_of
from prorl_hpc.tasks.registry import get_handler

_SHOWN_IMAGES = 3
_AGENTS_CONTEXT_TOKENS = 4096
_HOST_IMAGE_HAS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/workspace")


def data_problems(config: ProrlConfig) -> Iterator[str]:
    """Each as a sentence with its cure."""
    readers: dict[Split, Callable[[], list[Row]]] = {"train": lambda: read_rows(config.task)}
    if config.trainer.enabled:
        readers = {
            "train": lambda: load_rows(config.task, "train"),
            "heldout": lambda: load_rows(config.task, "heldout"),
        }
    told: dict[str, None] = dict.fromkeys(_of_the_task(config))
    images = {config.sandbox.image: "sandbox.image"}
    if config.agent.kind == "outside":
        yield from _outside_agent(config)
        if config.sandbox.kind == "apptainer":
            yield from _out_of_reach(config)
        if config.agent.image:
            images[config.agent.image] = "agent.image"
    for split, read in readers.items():
        try:
            images = {**_images_asked_for(config, split, read()), **images}
        except ConfigError as error:
            told[str(error)] = None
    yield from told
    if config.sandbox.kind != "local":
        yield from _images(config, images)


def data_warnings(config: ProrlConfig) -> Iterator[str]:
    """What is allowed and should be known."""
    if config.trainer.enabled and holds_out(config.task):
        yield f"task.heldout.path is not given: {told_held_out(config.task)}"
    if config.trainer.enabled:
        rows, asked = held_out_rows(config.task), config.trainer.eval_prompts
        if rows is not None and asked > rows:
            yield f"trainer.eval_prompts={asked}: there are {rows} held-out rows (task.heldout), and each evaluation takes them all"
    limit = config.model.max_context_tokens
    if config.agent.kind == "outside" and 0 < limit < _AGENTS_CONTEXT_TOKENS:
        yield (
            f"model.max_context_tokens={limit} is small for agent {config.agent.name}: agents' own prompts take thousands of "
            f"tokens, and a first one that does not fit fails the rollout. Set it to {_AGENTS_CONTEXT_TOKENS} or more, as far as "
            "the model goes"
        )
    if config.agent.kind == "outside" and config.sandbox.kind == "auto":
        yield from _out_of_reach(config)  # a sandbox of kind local would have it


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


def _out_of_reach(config: ProrlConfig) -> Iterator[str]:
    """A program that is named by a path which the image host, with its binds, does not have."""
    agent = config.agent
    command = agent.command[0] if agent.command else ""
    if (agent.image or config.sandbox.image) != HOST_IMAGE or not command.startswith("/") or "{" in command:
        return
    if not agent.image and _tasks_choose_images(config):
        return
    inside = [*_HOST_IMAGE_HAS, *(inside for _, inside in map(parse_bind, agent.binds))]
    if not any(PurePosixPath(command).is_relative_to(path) for path in inside):
        yield (
            f"agent.command: {command} is not in the sandbox: the image host has the node's /usr and what agent.binds names "
            f"(now {', '.join(agent.binds) or 'nothing'}). Bind the program's directory, such as "
            f"agent.binds=[{PurePosixPath(command).parent}] (of a virtual environment the whole of it), or set agent.image"
        )


def _tasks_choose_images(config: ProrlConfig) -> bool:
    try:
        return hasattr(get_handler(config.task.name, config.task), "sandbox")
    except ConfigError:
        return False


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
