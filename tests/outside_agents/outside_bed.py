"""One rollout of an outside agent in the stages of a worker: real sandbox, real gateway, a scripted model behind it."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from omegaconf import OmegaConf

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import TRAINED, AgentConfig, TaskConfig
from prorl_hpc.gateway.server import Gateway
from prorl_hpc.messages.control import Discarded, ServerRef, StageFinished, StartEval, StartInit, StartRun
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import Failure, RolloutSpec, SamplingParams
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.sandbox.protocol import Runtime
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.worker.outbox import Outbox
from prorl_hpc.worker.outside import OutsideRuns
from prorl_hpc.worker.policies import Policy
from prorl_hpc.worker.stages import StageRunner

PATIENCE_S = 120.0
SERVER = ServerRef("server-0", "node-a", "ipc:///none", "")
CONF = Path(__file__).parents[2] / "conf" / "agent"
ROW = {
    "id": "row-0",
    "kind": "first",
    "question": "Which number ends the first line of oak.txt?",
    "files": {"oak.txt": "river stone 4711\nmoss 1234\n"},
    "answer": "4711",
}


def agents_venv() -> Path:
    """The environment with the real agents (scripts/setup.sh test makes it); skips where it is not."""
    path = Path(os.environ.get("PRORL_AGENTS_VENV", Path(__file__).parents[2] / ".setup" / "agents-venv"))
    if not (path / "bin" / "mini").exists():
        pytest.skip(f"no outside agents at {path}: run `scripts/setup.sh test`, or set PRORL_AGENTS_VENV")
    return path


def shipped(name: str, **changes: Any) -> AgentConfig:
    """conf/agent/NAME.yaml, with its packages from this node's environment."""
    return with_packages(settings(yaml.safe_load((CONF / f"{name}.yaml").read_text()) | changes))


def settings(given: dict[str, Any]) -> AgentConfig:
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AgentConfig), given))
    assert isinstance(config, AgentConfig)
    return config


def with_packages(config: AgentConfig) -> AgentConfig:
    venv = agents_venv()
    python = (venv / "bin" / "python3").resolve()
    config.env["PATH"] = f"{venv}/bin:/usr/local/bin:/usr/bin:/bin"
    config.binds = [str(venv)]
    if not python.is_relative_to("/usr"):  # a Python of the user's own: the environment links to it
        config.binds.append(str(python.parents[1]))
    return config


class RecordedLLM:
    """Plays ``policy`` (prompt as text → turn) and keeps every call: prompt ids, and the completion."""

    def __init__(self, chat: ChatFormat, policy: Callable[[str], str | Exception]) -> None:
        self._chat = chat
        self._policy = policy
        self.calls: list[tuple[list[int], Completion]] = []
        self.prompts: list[str] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        prompt = self._chat.decode(list(token_ids), control_tokens=True)
        self.prompts.append(prompt)
        turn = self._policy(prompt)
        if isinstance(turn, Exception):
            raise turn
        ids = [*self._chat.encode_text(turn), self._chat.end_of_turn_id]
        logprobs = [-(len(self.calls) + 1) - at / 4096 for at in range(len(ids))]  # no two alike
        completion = Completion(ids, logprobs, FinishReason.STOP, [VersionSpan(7, 0, len(ids))])
        self.calls.append((list(token_ids), completion))
        return completion

    def move(self, server: ServerRef | None) -> None:
        """There is nowhere to go."""


@dataclass
class Played:
    """What the worker reported of a rollout."""

    failure: Failure | None = None
    trajectory: Trajectory = field(default_factory=Trajectory)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Reports(Outbox):
    """Whoever waits for a rollout's next report gets it."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[str, asyncio.Queue[StageFinished | Discarded]] = defaultdict(asyncio.Queue)

    def say(self, message: Any) -> None:
        self._heard[message.rollout_id].put_nowait(message)

    async def of(self, rollout_id: str) -> StageFinished | Discarded:
        async with asyncio.timeout(PATIENCE_S):
            return await self._heard[rollout_id].get()


class LLMs:
    """Each rollout's own (worker.llms.LLMSource)."""

    def __init__(self) -> None:
        self.of: dict[str, RecordedLLM] = {}

    def for_rollout(
        self, server: ServerRef, rollout_id: str, priority: int, trouble: Callable[[str, str], None] | None
    ) -> RecordedLLM:
        return self.of[rollout_id]


class Bed:
    """The stages of a worker. ``runtime`` is prepared and ``gateway`` started; the fixture closes both."""

    def __init__(self, runtime: Runtime, gateway: Gateway, chat: ChatFormat) -> None:
        self.runtime = runtime
        self.chat = chat
        self.handler = FileQuest(TaskConfig(name="file_quest"))
        self.reports = Reports()
        self._gateway = gateway
        self._llms = LLMs()

    def llm(self, policy: Callable[[str], str | Exception]) -> RecordedLLM:
        return RecordedLLM(self.chat, policy)

    def stages(
        self, config: AgentConfig, llm: RecordedLLM, rollout_id: str = "rollout-0", max_context_tokens: int = 65536
    ) -> StageRunner:
        self._llms.of[rollout_id] = llm
        policies = {TRAINED: Policy(self.chat, max_context_tokens=max_context_tokens, max_turn_tokens=2048)}
        runs = OutsideRuns(config, self._gateway.socket, self._gateway.open_session)
        return StageRunner(
            f"worker-{rollout_id}",
            self.runtime,
            self._llms,
            policies,
            lambda _: self.handler,
            self.reports,
            outside=runs,
        )

    async def play(
        self,
        config: AgentConfig,
        llm: RecordedLLM,
        rollout_id: str = "rollout-0",
        row: dict[str, Any] = ROW,
        max_context_tokens: int = 65536,
    ) -> Played:
        """INIT, RUN and EVAL, or up to the first failure."""
        stages = self.stages(config, llm, rollout_id, max_context_tokens)
        try:
            return await self._play(stages, RolloutSpec(rollout_id, "file_quest", row))
        finally:
            await stages.close()

    async def _play(self, stages: StageRunner, spec: RolloutSpec) -> Played:
        played = Played()
        for order in (
            lambda: stages.start_init(StartInit(spec, PATIENCE_S)),
            lambda: stages.start_run(StartRun(spec.rollout_id, SERVER, PATIENCE_S)),
            lambda: stages.start_eval(StartEval(spec.rollout_id, PATIENCE_S)),
        ):
            order()
            report = await self.reports.of(spec.rollout_id)
            assert isinstance(report, StageFinished)
            played.failure = report.failure
            if report.trajectory is not None:
                played.trajectory = trajectory_of(report)
            if report.failure is not None:
                break
            played.reward, played.metrics = report.reward, dict(report.metrics)
        return played


def trajectory_of(report: StageFinished | Discarded) -> Trajectory:
    assert report.trajectory is not None
    return msgspec.msgpack.decode(report.trajectory, type=Trajectory)


def conversations(trajectory: Trajectory) -> list[Trajectory]:
    return [trajectory, *trajectory.branches]


def check_exact(trajectory: Trajectory, llm: RecordedLLM) -> None:
    """Every generated id is trained once, where it was generated, with its logprob; nothing else is trained."""
    left = list(llm.calls)
    for conversation in conversations(trajectory):
        ids, mask, logprobs = conversation.token_ids, conversation.loss_mask, conversation.logprobs
        at = 0
        while at < len(ids):
            if not mask[at]:
                at += 1
                continue
            call = next(call for call in left if call[0] == ids[:at])  # the engine saw exactly these
            n = len(call[1].token_ids)
            assert ids[at : at + n] == call[1].token_ids
            assert mask[at : at + n] == [True] * n
            assert logprobs[at : at + n] == call[1].logprobs
            left.remove(call)
            at += n
        assert {s.weight_version for s in conversation.segments if s.trained} == {7}
    assert left == []
