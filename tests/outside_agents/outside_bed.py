"""One rollout of an outside agent, as a worker plays it: real sandbox, real gateway, a scripted model behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.config.schema import AgentConfig, TaskConfig
from prorl_hpc.gateway.server import Gateway
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.sandbox.protocol import Runtime, spec_of
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext, needs_of
from prorl_hpc.worker.outside import OutsideRuns
from prorl_hpc.worker.policies import Policy

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


class Bed:
    """``runtime`` is prepared and ``gateway`` started; the fixture closes both."""

    def __init__(self, runtime: Runtime, gateway: Gateway, chat: ChatFormat) -> None:
        self.runtime = runtime
        self.gateway = gateway
        self.policy = Policy(chat, max_context_tokens=65536, max_turn_tokens=2048)
        self.handler = FileQuest(TaskConfig(name="file_quest"))
        self.context: RolloutContext | None = None

    def llm(self, policy: Callable[[str], str | Exception]) -> RecordedLLM:
        return RecordedLLM(self.policy.chat, policy)

    async def play(self, config: AgentConfig, llm: RecordedLLM) -> tuple[Evaluation, Trajectory]:
        """INIT, RUN and EVAL."""
        runs = OutsideRuns(config, self.gateway.socket, self.gateway.open_session)
        spec = RolloutSpec("rollout-0", "file_quest", ROW)
        sandbox = await self.runtime.start(spec_of("box-0", runs.needs(needs_of(self.handler, ROW))))
        try:
            context = self.context = RolloutContext(spec, sandbox)
            runs.check(self.handler, spec)
            await self.handler.init(context)
            context.conversation = self.policy.converse(spec, llm)
            context.converse = lambda: self.policy.converse(spec, llm, len(context.branches) + 1)
            await runs.run(self.handler, context, self.policy)
            evaluation = await self.handler.eval(context)
        finally:
            await sandbox.stop()
        trajectory = context.trajectory
        assert trajectory is not None and isinstance(context.conversation, TokenConversation)
        return evaluation, trajectory


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
