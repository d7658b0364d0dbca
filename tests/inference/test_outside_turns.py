"""A rollout on an outside server that lists its models, and does not generate as it should: it goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_vllm import serve_outside
from waiting import until

from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.keys import RunKeys


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("busy", "has not ended a turn of at most 4 tokens within 3 s (engine.outside_turn_s)"),
        ("trickle", "has not ended a turn of at most 4 tokens within 3 s (engine.outside_turn_s)"),
        ("no-tokens", "returned no tokens"),
        ("more", "returned 5 tokens: asked for were at most 4"),
    ],
)
async def test_the_rollout_goes_on_elsewhere(socket_dir: Path, mode: str, words: str) -> None:
    troubles: list[tuple[str, str]] = []
    client = LLMClient("here", RunKeys.create(socket_dir / "keys"), "worker-0", outside_turn_s=3)
    async with serve_outside(socket_dir / "bad.sock", mode) as bad, serve_outside(socket_dir / "good.sock") as good:
        old, new = (ServerRef(name, "", "", "", url=url) for name, url in (("bad", bad.url), ("good", good.url)))
        llm = client.for_rollout(old, "r", trouble=lambda *trouble: (troubles.append(trouble), llm.move(new))[0])
        completion = await llm.generate([1, 2], SamplingParams(max_tokens=4))
        assert len(completion.token_ids) == 4
        await until(lambda: not bad.in_flight)
        await client.close()
    ((server_id, message),) = troubles
    assert server_id == "bad" and words in message and f"LLM server bad at unix:{socket_dir}" in message
