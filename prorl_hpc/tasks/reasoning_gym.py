"""Problems of the ``reasoning-gym`` package with a bash tool, verified by the package's own scorer.

``task.options.dataset`` names the generator (``simple_equations``, ``chain_sum``, …), ``task.options.settings`` its
parameters; of a mixture, names and weights, and parameters by name. Scoring runs in a process of its own with a time limit: answers
are whatever the model wrote, and some scorers parse or compute for long.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

from prorl_hpc.agents.tool_formats import tag_format
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.answers import final_answer
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import in_split, require
from prorl_hpc.tasks.side.options import read_mapping
from prorl_hpc.tasks.side.process import SideError, SideServer

_SYSTEM = (
    "You solve problems with a bash tool. Write <bash>command</bash> to run a command and see its output. "
    "When you know the result, write answer: RESULT"
)
_SCORE_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 60.0
"""For the import of the package."""
_DRAWS_PER_ROW = 40
"""Draws from the generator per wanted row before it is taken as too small."""


class ReasoningGym:
    """An AgentHandler. Rows: id, question, entry (what the package's scorer needs)."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("dataset", "settings", "partial"))
        self._task = task
        self._weights, self._settings = _read_mixture(task.options)
        self._partial = bool(task.options.get("partial", False))
        self._loop = ToolLoop(
            tag_format(task.observation_limit_chars), task.max_turns, task.call_timeout_s, max_repeats=task.max_repeats
        )
        for name in self._weights:
            _known_dataset(name)
        self._scorers = SideServer("reasoning_scores", "", {}, _START_TIMEOUT_S)

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        shares = _shares(self._weights, size)
        rows = [row for name, share in shares.items() for row in self._rows_of(name, split, share, seed)]
        if len(shares) > 1:
            random.Random(seed).shuffle(rows)
        return rows

    def _rows_of(self, dataset: str, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        if size == 0:
            return []
        source = _create(dataset, self._settings[dataset], size * _DRAWS_PER_ROW, seed)
        rows: list[dict[str, Any]] = []
        questions: set[str] = set()
        for index in range(len(source)):
            entry = json.loads(json.dumps(source[index]))
            question = entry["question"]
            if question not in questions and in_split(split, question):
                questions.add(question)
                name = f"{dataset}-{split}-{seed}-{index}"
                rows.append({"id": name, "question": question, "dataset": dataset, "entry": entry})
            if len(rows) == size:
                return rows
        raise ConfigError(
            f"task.options.dataset={dataset} gave only {len(rows)} different {split} problems of {size}: "
            f"lower task.{split}.size or widen task.options.settings"
        )

    def check_row(self, row: Mapping[str, Any]) -> None:
        require(row, "question", str)
        _known_dataset(require(row, "dataset", str))
        entry = require(row, "entry", dict)
        for field in ("question", "answer", "metadata"):
            if field not in entry:
                raise ValueError(f"field entry.{field} is missing")

    def instruction(self, row: Mapping[str, Any]) -> str:
        """For outside agents."""
        return f"{row['question']}\n\nEnd with a line that says answer: and the result alone."

    async def init(self, context: RolloutContext) -> None:
        """Wait for the process that scorers are forked from, once on each worker."""
        await self._scorers.ready()

    async def run(self, context: RolloutContext) -> None:
        messages = [
            Message("system", self._task.system_prompt or _SYSTEM),
            Message("user", context.spec.row["question"]),
        ]
        context.notes["outcome"] = await self._loop.run(context.require_conversation(), context.sandbox, messages)

    async def eval(self, context: RolloutContext) -> Evaluation:
        outcome: LoopOutcome = context.notes["outcome"]
        score = 0.0
        if outcome.answer is not None:
            row = context.spec.row
            score = await self._score(row["dataset"], final_answer(outcome.answer), row["entry"])
        # Several scorers give a little for a well-formed wrong answer; only a right one counts unless all is asked for.
        reward = score if self._partial else float(score >= 1.0)
        return Evaluation(reward, {**outcome.metrics(), "score": score})

    async def _score(self, dataset: str, answer: str, entry: Mapping[str, Any]) -> float:
        """The package's score in [0, 1]; raises RuntimeError if its scorer breaks or does not end in time."""
        question = {"dataset": dataset, "settings": self._settings.get(dataset, {}), "answer": answer, "entry": entry}
        try:
            async with self._scorers.episode() as scorer:
                return float(await scorer.call("score", _SCORE_TIMEOUT_S, **question))
        except SideError as error:
            raise RuntimeError(f"the scorer of {dataset}: {error}") from error


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "task.name=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym, on every node"
        ) from error
    return reasoning_gym


def _known_dataset(name: str) -> None:
    _package()
    import difflib

    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)) or "see reasoning-gym's gallery"
        raise ConfigError(f"task.options.dataset={name} is not a dataset of reasoning-gym: near it: {near}")


def _create(name: str, settings: Mapping[str, Any], size: int, seed: int) -> Any:
    try:
        return _package().create_dataset(name, size=size, seed=seed, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.options.settings={dict(settings)} does not fit {name}: {error}") from error


def _read_mixture(options: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Weights and settings by dataset."""
    given = options.get("dataset", "simple_equations")
    settings = read_mapping(options, "settings")
    if isinstance(given, str):
        return {given: 1.0}, {given: settings}
    weights = read_mapping(options, "dataset")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"task.options.dataset.{name}={weight!r}: expected a weight, more than 0")
    if not weights:
        raise ConfigError("task.options.dataset is empty: give a dataset's name, or names and weights")
    if unknown := sorted(set(settings) - set(weights)):
        raise ConfigError(
            f"task.options.settings.{unknown[0]}: of a mixture, settings are given by dataset, like "
            f"{{{next(iter(weights))}: {{…}}}}; its datasets: {', '.join(weights)}"
        )
    return weights, {name: read_mapping(settings, name) for name in weights}


def _shares(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """``size`` rows by weight, the largest remainders rounded up."""
    whole = sum(weights.values())
    exact = {name: size * weight / whole for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: size - sum(shares.values())]:
        shares[name] += 1
    return shares
