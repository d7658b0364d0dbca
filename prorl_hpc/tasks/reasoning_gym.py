"""Problems of the ``reasoning-gym`` package with a bash tool, verified by the package's own scorer.

``task.options.dataset`` names the generator (``simple_equations``, ``chain_sum``, …),
``task.options.settings`` its parameters. Scoring runs in a process of its own with a time limit: answers
are whatever the model wrote, and some scorers parse or compute for long.
"""

from __future__ import annotations

import asyncio
import json
import sys
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

_SYSTEM = (
    "You solve problems with a bash tool. Write <bash>command</bash> to run a command and see its output. "
    "When you know the result, write answer: RESULT"
)
_SCORE_TIMEOUT_S = 30.0
_DRAWS_PER_ROW = 40
"""Draws from the generator per wanted row before it is taken as too small."""


class ReasoningGym:
    """An AgentHandler. Rows: id, question, entry (what the package's scorer needs)."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("dataset", "settings"))
        self._task = task
        self._dataset = str(task.options.get("dataset", "simple_equations"))
        self._settings: dict[str, Any] = dict(task.options.get("settings") or {})
        self._loop = ToolLoop(
            tag_format(task.observation_limit_chars), task.max_turns, task.call_timeout_s, max_repeats=task.max_repeats
        )
        _known_dataset(self._dataset)

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        source = _create(self._dataset, self._settings, size * _DRAWS_PER_ROW, seed)
        rows: list[dict[str, Any]] = []
        questions: set[str] = set()
        for index in range(len(source)):
            entry = json.loads(json.dumps(source[index]))
            question = entry["question"]
            if question not in questions and in_split(split, question):
                questions.add(question)
                name = f"{self._dataset}-{split}-{seed}-{index}"
                rows.append({"id": name, "question": question, "dataset": self._dataset, "entry": entry})
            if len(rows) == size:
                return rows
        raise ConfigError(
            f"task.options.dataset={self._dataset} gave only {len(rows)} different {split} problems of {size}: "
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
        """Nothing to prepare."""

    async def run(self, context: RolloutContext) -> None:
        messages = [Message("system", _SYSTEM), Message("user", context.spec.row["question"])]
        context.notes["outcome"] = await self._loop.run(context.require_conversation(), context.sandbox, messages)

    async def eval(self, context: RolloutContext) -> Evaluation:
        outcome: LoopOutcome = context.notes["outcome"]
        score = 0.0
        if outcome.answer is not None:
            row = context.spec.row
            score = await _score(row["dataset"], final_answer(outcome.answer), row["entry"])
        # Several scorers give a little for a well-formed wrong answer; only a right one counts here.
        return Evaluation(1.0 if score >= 1.0 else 0.0, {**outcome.metrics(), "score": score})


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


async def _score(dataset: str, answer: str, entry: Mapping[str, Any]) -> float:
    """The package's score in [0, 1]; raises RuntimeError if its scorer breaks or does not end in time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prorl_hpc.tasks.reasoning_gym",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    question = json.dumps({"dataset": dataset, "answer": answer, "entry": entry}).encode()
    try:
        out, err = await asyncio.wait_for(process.communicate(question), _SCORE_TIMEOUT_S)
    except TimeoutError as error:
        raise RuntimeError(f"the scorer of {dataset} did not end within {_SCORE_TIMEOUT_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"the scorer of {dataset} broke: {err.decode(errors='replace').strip()[-500:]}")
    return float(json.loads(out.splitlines()[-1])["score"])


def _score_main() -> None:
    """Reads {dataset, answer, entry} from stdin, prints {"score": …} as the last line."""
    question = json.load(sys.stdin)
    scorer = _create(question["dataset"], {}, 1, 0)
    score = scorer.score_answer(answer=question["answer"], entry=question["entry"])
    sys.stdout.write("\n" + json.dumps({"score": score}) + "\n")


if __name__ == "__main__":
    _score_main()
