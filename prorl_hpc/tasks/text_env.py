"""Any environment with ``reset`` and ``step`` whose observations and actions are text, as Gymnasium has them.

``task.options.env`` names it: ``module:Class`` (or a function that makes one), or an id that Gymnasium knows. Each episode
lives in a process of its own, so that it may block, crash or hang; it is forked from one that has imported the environment,
and ends with the rollout. An observation is the user's
message, the action is found in the assistant's turn, and the reward is the episode's.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prorl_hpc.agents.tool_formats import cut_middle
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Finish, Message
from prorl_hpc.tasks.protocol import Conversation, Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import in_split, require
from prorl_hpc.tasks.side.options import interpreter_problem, read_mapping, read_name, read_seconds
from prorl_hpc.tasks.side.process import Call, SideEpisode, SideError, SideServer, call_once

_MODULE = "text_environment"
_THOUGHT = re.compile(r"\A(?:\s*<think>)?.*?</think>", re.DOTALL)
_SEEDS = 2**31
_OPTIONS = ("env", "kwargs", "python", "action", "no_action", "reward", "reset", "start_timeout_s")


@dataclass(frozen=True)
class TextEnvOptions:
    """``task.options`` of text_env."""

    env: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class, the function or gymnasium.make."""
    python: str = ""
    """The interpreter that has the environment; empty: the one that runs the worker."""
    action: re.Pattern[str] | None = None
    """The last match in the turn, its first group if there is one, is the action; None: the whole turn without thought."""
    no_action: str = "tell"
    """What becomes of a turn without a match: tell (the policy is told, the environment is not), or end."""
    reward: str = "sum"
    """sum of all steps' rewards, or the last one."""
    reset: dict[str, Any] = field(default_factory=dict)
    """Options of reset; those of the row come over them."""
    start_timeout_s: float = 60.0
    """How long importing and making the environment and its first reset may take."""


@dataclass
class Episode:
    """How it went."""

    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    without_action: int = 0
    terminated: bool = False
    truncated: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the last step's info."""


class TextEnv:
    """An AgentHandler. Rows: id, seed, options (of reset)."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, _OPTIONS)
        self._task = task
        self._options = _read_options(task.options)
        start = {"env": self._options.env}
        self._server = SideServer(_MODULE, self._options.python, start, self._options.start_timeout_s)

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        source = random.Random(f"{split}/{seed}")
        seeds: dict[int, None] = {}
        while len(seeds) < size:
            drawn = source.randrange(_SEEDS)
            if in_split(split, str(drawn)):
                seeds[drawn] = None
        return [{"id": f"{split}-{drawn}", "seed": drawn, "options": {}} for drawn in seeds]

    def check_row(self, row: Mapping[str, Any]) -> None:
        seed = require(row, "seed", int)
        if isinstance(seed, bool) or not 0 <= seed < _SEEDS:
            raise ValueError(f"field seed is {seed}, expected 0 to {_SEEDS - 1}")
        if not isinstance(options := row.get("options", {}), dict):
            raise ValueError(f"field options is a {type(options).__name__}, expected an object")

    def problems(self) -> Iterator[str]:
        """Asked before a launch: makes and resets the environment once, in a process of its own."""
        options = self._options
        if problem := interpreter_problem(options.python):
            yield problem
            return
        opening = {"kwargs": options.kwargs, "seed": 0, "options": options.reset}
        try:
            calls: list[Call] = [("prepare", {"env": options.env}), ("begin", opening)]
            call_once(_MODULE, options.python, calls, options.start_timeout_s)
        except SideError as error:
            yield f"task.options.env={options.env} cannot be played: {error}"

    async def init(self, context: RolloutContext) -> None:
        """The episode's own process lives within RUN, which ends it whatever happens; here is waited for the one that
        imports the environment, once on each worker."""
        try:
            await self._server.ready()
        except SideError as error:
            raise RuntimeError(f"the environment {self._options.env}: {error}") from error

    async def run(self, context: RolloutContext) -> None:
        options, row = self._options, context.spec.row
        episode = context.notes["episode"] = Episode()
        try:
            async with self._server.episode() as side:
                begun = await side.call(
                    "begin",
                    options.start_timeout_s,
                    kwargs=options.kwargs,
                    seed=row["seed"],
                    options={**options.reset, **row.get("options", {})},
                )
                await self._play(context.require_conversation(), side, begun, episode)
        except SideError as error:
            raise RuntimeError(f"the environment {options.env}, seed {row['seed']}: {error}") from error

    async def eval(self, context: RolloutContext) -> Evaluation:
        episode: Episode = context.notes["episode"]
        rewards = episode.rewards or [0.0]
        reward = math.fsum(rewards) if self._options.reward == "sum" else rewards[-1]
        return Evaluation(
            reward,
            {
                **{f"info_{name}": value for name, value in episode.numbers.items()},
                "turns": episode.turns,
                "steps": len(episode.rewards),
                "without_action": episode.without_action,
                "terminated": float(episode.terminated),
                "truncated_by_environment": float(episode.truncated),
            },
        )

    async def _play(
        self, conversation: Conversation, side: SideEpisode, begun: Mapping[str, Any], episode: Episode
    ) -> None:
        system = self._task.system_prompt or begun["system_prompt"]
        opening = [Message("system", system)] if system else []
        conversation.append([*opening, self._observation(begun["text"])])
        while True:
            turn = await conversation.generate()
            if not turn and conversation.truncated:
                return  # there was no room for a turn
            episode.turns += 1
            if conversation.truncated:
                return
            reply = await self._answer(turn, side, episode)
            if episode.terminated or episode.truncated:
                conversation.end(Finish.ENVIRONMENT)
                return
            if reply is None:
                conversation.end(Finish.MALFORMED)
                return
            if episode.turns >= self._task.max_turns:
                conversation.end(Finish.TURNS)
                return
            conversation.append([reply])

    async def _answer(self, turn: str, side: SideEpisode, episode: Episode) -> Message | None:
        """What the policy is shown; None if the rollout ends for want of an action."""
        action = find_action(turn, self._options.action)
        if action is None:
            episode.without_action += 1
            assert self._options.action is not None, "a whole turn is always an action"
            if self._options.no_action == "end":
                return None
            return Message("user", f"No action was found. It must match {self._options.action.pattern}")
        step = await side.call("step", self._task.call_timeout_s, action=action)
        episode.rewards.append(step["reward"])
        episode.terminated, episode.truncated = step["terminated"], step["truncated"]
        episode.numbers = step["numbers"]
        return self._observation(step["text"])

    def _observation(self, text: str) -> Message:
        return Message("user", cut_middle(text, self._task.observation_limit_chars))


def find_action(turn: str, pattern: re.Pattern[str] | None) -> str | None:
    """The action in ``turn`` outside of thought; None if ``pattern`` is nowhere in it."""
    spoken = _THOUGHT.sub("", turn, count=1)
    if pattern is None:
        return spoken.strip()
    found = None
    for match in pattern.finditer(spoken):
        found = match.group(1) if pattern.groups else match.group()
    return found


def _read_options(given: Mapping[str, Any]) -> TextEnvOptions:
    for name, allowed in (("reward", ("sum", "last")), ("no_action", ("tell", "end"))):
        if given.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"task.options.{name}={given[name]}: expected {' or '.join(allowed)}")
    return TextEnvOptions(
        env=read_name(given, "env", "an environment, as module:Class or as a Gymnasium id like FrozenLake-v1"),
        kwargs=read_mapping(given, "kwargs"),
        python=str(given.get("python") or ""),
        action=_read_pattern(given.get("action") or ""),
        no_action=given.get("no_action", "tell"),
        reward=given.get("reward", "sum"),
        reset=read_mapping(given, "reset"),
        start_timeout_s=read_seconds(given, "start_timeout_s", TextEnvOptions.start_timeout_s),
    )


def _read_pattern(text: Any) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"task.options.action={text!r} is not a regular expression: {error}") from error
