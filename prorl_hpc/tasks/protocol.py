"""What a task is: three stages around a sandbox and an LLM, both seen only as protocols.

A task is an AgentHandler registered under a name. Its stages get a RolloutContext; whatever they raise
becomes a Failure (SandboxError → sandbox, InferenceError → inference, anything else → task).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.messages.trajectory import Finish, Message, ToolSchema, Trajectory
from prorl_hpc.sandbox.protocol import Sandbox, SandboxNeeds

WebSearch = Callable[[str, float], Awaitable[str]]
"""(query, seconds it may take) → results as text, empty if there are none; raises OSError or TimeoutError if the search
does not answer."""


class LLM(Protocol):
    """The policy, as tokens. Sticky: all calls of one rollout reach the same server."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """Continue ``token_ids``; raises InferenceError."""
        ...


@dataclass(frozen=True)
class Turn:
    """One assistant turn as it was generated. ``text`` is without control tokens; ``raw`` has them, but not the one that
    ends the turn. ``token_ids`` and ``logprobs`` have equal length."""

    text: str
    raw: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class Conversation(Protocol):
    """A chat as token ids that only grow. Implemented in prorl_hpc.agents."""

    def append(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Tokenize new messages alone and append them, then open the assistant's turn. ``tools`` are told of in the first
        prompt and have no effect later."""
        ...

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """One assistant turn: appends exactly the ids that the engine returned, and returns their text without
        control tokens. ``finish`` is set if it was cut at a token limit. The arguments narrow this turn's limits."""
        ...

    def end(self, finish: Finish) -> None:
        """Say why the rollout ends; a cut at a token limit, which is noted by itself, stays."""
        ...

    def fork(self, num_messages: int) -> Conversation:
        """Another conversation that begins with this one's first ``num_messages`` messages, where a turn begins or ends;
        their tokens are not trained in it."""
        ...

    @property
    def tool_format(self) -> str:
        """How the model writes tool calls: a name of agents.tool_formats."""
        ...

    @property
    def last_turn(self) -> Turn | None: ...

    @property
    def finish(self) -> Finish: ...

    @property
    def truncated(self) -> bool:
        """Whether ``finish`` is a cut at a token limit."""
        ...

    @property
    def trajectory(self) -> Trajectory: ...


@dataclass(frozen=True)
class Evaluation:
    """The verified reward, and numbers for people (``turns``, ``tool_calls``, …)."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class GatewaySession(Protocol):
    """One rollout at the LLM gateway (gateway.session.Session)."""

    @property
    def key(self) -> str:
        """Bearer token, or x-api-key, of this rollout's calls."""
        ...

    @property
    def calls(self) -> int:
        """Well-formed calls so far."""
        ...

    @property
    def last_text(self) -> str:
        """The last text that the model wrote, calls and thought left out, in whichever conversation."""
        ...

    @property
    def failure(self) -> InferenceError | None:
        """Set when the LLM server broke: the rollout cannot go on."""
        ...

    @property
    def refused(self) -> str:
        """Why the last call that was not put to the model was refused; empty if none was."""
        ...

    @property
    def over(self) -> bool:
        """Every further call is refused."""
        ...

    async def wait_over(self) -> None: ...


@dataclass(frozen=True)
class GatewayAccess:
    """The policy as OpenAI's and Anthropic's APIs, on the Unix socket ``socket`` of this node. What is said there becomes
    the rollout's trajectory."""

    socket: Path
    session: GatewaySession


@dataclass
class RolloutContext:
    """One rollout on its way through the stages. ``notes`` carries what a later stage needs, such as
    the final answer that RUN found. ``branches`` are further conversations, each a sample of its own in training; RUN
    and later stages can open one with ``converse``, or take one from ``conversation.fork``."""

    spec: RolloutSpec
    sandbox: Sandbox
    conversation: Conversation | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    branches: list[Conversation] = field(default_factory=list)
    converse: Callable[[], Conversation] | None = None
    web_search: WebSearch | None = None
    """Asks task.web_search_url from the worker; None where that is empty."""
    gateway: GatewayAccess | None = None
    """In RUN, if the handler has ``wants_gateway = True``."""

    def require_gateway(self) -> GatewayAccess:
        assert self.gateway is not None, "RUN of a handler that wants a gateway has one"
        return self.gateway

    def require_conversation(self) -> Conversation:
        assert self.conversation is not None, "RUN and later stages have a conversation"
        return self.conversation

    def new_conversation(self) -> Conversation:
        """A further, empty conversation with the same policy, kept among ``branches``."""
        assert self.converse is not None, "RUN and later stages can converse"
        conversation = self.converse()
        self.branches.append(conversation)
        return conversation

    @property
    def trajectory(self) -> Trajectory | None:
        """Of all conversations so far; None before RUN. Branches in which nothing was generated are left out."""
        if self.conversation is None:
            return None
        branches = [branch.trajectory for branch in self.branches]
        return replace(self.conversation.trajectory, branches=[b for b in branches if b.num_trained_tokens])


class AgentHandler(Protocol):
    """One task, constructed with its TaskConfig. Instances are made once per worker and shared by its
    rollouts: keep no state in them beyond the configuration.

    A handler may have the class attribute ``eval_in_fresh_sandbox = True``: then the sandbox is stopped after RUN, and
    EVAL finds a newly started one in its context, which nothing that the policy did has touched. What EVAL needs of
    the old one (a patch, say) RUN puts into ``context.notes``. Without the attribute EVAL gets RUN's sandbox. It may be a
    method ``eval_in_fresh_sandbox(row) -> bool`` instead.

    It may also have a method ``sandbox(row) -> SandboxNeeds``: the image, network and environment that this row's
    sandboxes are started with, where they differ from the run's defaults.

    One whose episodes call the policy over HTTP has the class attribute ``wants_gateway = True``: RUN finds a session of
    the LLM gateway in ``context.gateway``, which is closed when RUN ends. ``task.max_turns`` bounds its calls.

    It may have a method ``problems() -> Iterator[str]``, asked once before a launch: what stands in the way of the task on
    this machine, each as a sentence with its cure. It may take seconds, such as to start an environment.

    A handler that outside agents (group ``agent``) can play has a method ``instruction(row) -> str``: the whole task in
    words, told to the agent in place of ``run``. The agent's answer is then in ``context.notes["outcome"]``, as an
    agents.tool_loop.LoopOutcome, for ``eval``. If it also has ``async collect(context)``, that is awaited when the agent has
    ended, within RUN: there it takes from the sandbox what ``eval`` needs and a fresh sandbox does not have. A ``run`` of its
    own calls that itself."""

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        """The built-in dataset: ``size`` rows of ``split`` (train or heldout), the same for the same arguments.
        Raises ConfigError if the task has none and needs data.path."""
        ...

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError naming the field if ``row`` is not one of this task's rows. Every row has a string ``id``."""
        ...

    async def init(self, context: RolloutContext) -> None:
        """Prepare the sandbox."""
        ...

    async def run(self, context: RolloutContext) -> None:
        """Drive the agent loop."""
        ...

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Score; the truth comes from the row, never from the sandbox's word alone."""
        ...


def wants_fresh_sandbox(handler: AgentHandler, row: Mapping[str, Any]) -> bool:
    """Whether EVAL of ``row`` is to get a sandbox of its own."""
    wanted = getattr(handler, "eval_in_fresh_sandbox", False)
    return bool(wanted(row) if callable(wanted) else wanted)


def wants_gateway(handler: AgentHandler) -> bool:
    """Whether RUN is to find a session of the LLM gateway."""
    return bool(getattr(handler, "wants_gateway", False))


def needs_of(handler: AgentHandler, row: Mapping[str, Any]) -> SandboxNeeds:
    """What the sandboxes of ``row`` are started with."""
    asked = getattr(handler, "sandbox", None)
    return SandboxNeeds() if asked is None else asked(row)


async def collect(handler: AgentHandler, context: RolloutContext) -> None:
    """Have the task take what EVAL needs from the sandbox that somebody else has played in."""
    asked = getattr(handler, "collect", None)
    if asked is not None:
        await asked(context)


def problems_of(handler: AgentHandler) -> Iterable[str]:
    """What the task finds wrong before a launch."""
    asked = getattr(handler, "problems", None)
    return () if asked is None else asked()
