"""An engine of the run that answers garbage: no worker gets it, and no rollout comes until the answers are good again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from agent_site import open_site
from fake_vllm import GARBAGE
from vllm_bench import Bench
from waiting import until

from prorl_hpc.inference.protocol import BadAnswer, ServerDown
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.inference.soundness import check_completion
from prorl_hpc.messages.control import InferenceHello, ServerLoad
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams


def write_config(directory: Path, vocab_size: int = 1000) -> None:
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))


async def test_what_a_vllm_server_should_not_answer_is_refused_by_name(bench: Bench, socket_dir: Path) -> None:
    write_config(socket_dir)
    engine = bench.engine()
    await engine.start(lambda text: None)
    for i, mode in enumerate(GARBAGE):
        with pytest.raises(BadAnswer, match=r"inference-0 (answers|returned) "):
            completion = await engine.generate(mode, [900 + i], SamplingParams(), 50)
            check_completion(completion, engine.model.vocab_size, "inference-0", 16)
    assert (await engine.generate("r", [1], SamplingParams(), 50)).token_ids == [5, 6]
    await engine.stop()


class Wrong(ScriptedEngine):
    """Answers with ``wrong``, as long as it has one."""

    wrong: Completion | None = None

    async def generate(self, *args: object) -> Completion:
        return self.wrong or Completion([1], [-0.5], FinishReason.STOP, [VersionSpan(0, 0, 1)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Completion([1], [0.5], FinishReason.STOP, [VersionSpan(0, 0, 1)]), "returned 0.5 as the logprob"),
        (Completion([1] * 50, [-0.5] * 50, FinishReason.STOP, [VersionSpan(0, 0, 50)]), "returned 50 tokens"),
        (Completion([], [], FinishReason.STOP, []), "returned no tokens"),
        (Completion([1], [-0.5], FinishReason.STOP, []), "must have one version"),
    ],
)
async def test_a_server_that_goes_on_with_garbage_stays_unwell(socket_dir: Path, wrong: Completion, words: str) -> None:
    engine = Wrong()
    engine.wrong = wrong
    async with open_site(socket_dir, engine) as site:
        worker = site.worker()
        with pytest.raises(ServerDown, match=f"^inference-0 .*{words}"):
            await worker.for_rollout(site.ref, "r").generate([1], SamplingParams(max_tokens=16))
        for _ in range(3):
            load = await site.coordinator.next(ServerLoad, lambda load: not load.healthy)
            assert words in load.detail
        engine.wrong = None
        await site.coordinator.next(ServerLoad, lambda load: load.healthy)
        await worker.close()


async def test_the_agent_says_what_it_serves(socket_dir: Path) -> None:
    write_config(socket_dir)
    engine = ScriptedEngine(model_path=socket_dir)
    await engine.start(lambda text: None)
    async with open_site(socket_dir, engine) as site:
        hello = await site.coordinator.next(InferenceHello)
        assert hello.fingerprint == engine.model.fingerprint != ""


async def test_a_server_that_would_come_back_with_another_model_does_not_come_back(
    bench: Bench, socket_dir: Path
) -> None:
    write_config(socket_dir)
    engine = bench.engine(restarts=1)
    await engine.start(lambda text: None)
    write_config(socket_dir, vocab_size=64)
    bench.processes[0].kill()
    words = await engine.wait_broken()
    assert "inference-0" in words and "another model or vocabulary" in words and "64" in words
    with pytest.raises(InferenceError, match="another model"):
        await engine.generate("r", [1], SamplingParams(), 50)
    await engine.stop()


async def test_a_death_takes_the_processes_that_left_the_group_and_their_shared_memory(
    bench: Bench, socket_dir: Path
) -> None:
    engine = bench.engine(("strays",), restarts=1)
    await engine.start(lambda text: None)
    stray = int((socket_dir / "v.sock.stray").read_text())
    os.kill(stray, 0)
    shared = Path((socket_dir / "v.sock.shared").read_text())
    assert shared.exists()
    bench.processes[0].kill()
    await until(lambda: len(bench.processes) == 2 and engine.serving)
    assert not runs(stray) and not shared.exists()
    stray, shared = int((socket_dir / "v.sock.stray").read_text()), Path((socket_dir / "v.sock.shared").read_text())
    await engine.stop()
    assert not runs(stray) and not shared.exists()


def runs(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
