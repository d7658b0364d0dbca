"""A seeded run is repeatable, and no two rollouts of it are copies of one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import Spent
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model
from prorl_hpc.worker.policies import Policy


async def seed_of(chat: ChatFormat, rollout_id: str, group_id: str, sample: int = 0, row: str = "row") -> int | None:
    llm = ScriptedLLM(chat, lambda prompt: "word")
    spec = RolloutSpec(rollout_id, "task", {"id": row}, group_id, sample, SamplingParams(seed=1))
    conversation = Policy(chat, 1000, 100).converse(spec, llm, Spent())
    conversation.append([Message("user", "hi")])
    await conversation.generate()
    return llm.calls[0][1].seed


@pytest.mark.parametrize("other", [("step-1.g1", 0, "row"), ("step-1.g0", 1, "row"), ("step-1.g0", 0, "other")])
async def test_rows_groups_and_samples_draw_differently(tmp_path: Path, other: tuple[str, int, str]) -> None:
    chat = ChatFormat.open(write_chat_model(tmp_path / "model"))
    assert await seed_of(chat, "a", "step-1.g0") != await seed_of(chat, "a", *other)


async def test_the_same_place_in_another_run_draws_the_same(tmp_path: Path) -> None:
    chat = ChatFormat.open(write_chat_model(tmp_path / "model"))
    assert await seed_of(chat, "a", "step-1.g0") == await seed_of(chat, "b", "another-name.g0")
