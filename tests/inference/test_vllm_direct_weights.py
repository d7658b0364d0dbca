"""Two real vLLM servers that the trainer streams weights to, and what becomes of them when one or the trainer dies."""

from __future__ import annotations

import asyncio
import socket
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_cases import PROMPT, ModelReference, make_vllm, new_secret
from waiting import until

from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_process import group_alive
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport import weight_server
from prorl_hpc.transport.weight_server import WeightServer
from prorl_hpc.transport.weight_stream import read_key

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # of a busy machine: three vLLM servers are started
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'prorl_hpc[vllm]'"),
]


class Gate:
    """Lets nobody past ``after`` pieces of a stream while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self._after, self._send_all = after, weight_server.send_all
        self._sent: dict[int, int] = {}
        self.opened = threading.Event()
        self.opened.set()
        monkeypatch.setattr(weight_server, "send_all", self._send)

    def _send(self, connection: socket.socket, data: memoryview) -> None:
        sent = self._sent[id(connection)] = self._sent.get(id(connection), 0) + 1
        if sent > self._after:
            self.opened.wait(600)
        self._send_all(connection, data)

    def shut(self) -> None:
        self._sent.clear()
        self.opened.clear()

    @property
    def waiting(self) -> int:
        return sum(sent > self._after for sent in self._sent.values())


async def is_served(engine: VllmEngine, reference: ModelReference, version: int) -> None:
    assert engine.weight_version == version
    answer = await engine.generate(f"v{version}", PROMPT, SamplingParams(max_tokens=6, seed=1), 50)
    expected = reference.scores(PROMPT + answer.token_ids, version)[len(PROMPT) - 1 :]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert [span.version for span in answer.versions] == [version]


async def test_deaths_in_the_middle_of_a_stream(
    tiny_model: Path, socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = new_secret(tmp_path)
    stream, gate = WeightServer("127.0.0.1", read_key(secret)), Gate(monkeypatch, after=6)
    reference = ModelReference(tiny_model, tmp_path)
    for name in "ab":
        (socket_dir / name).mkdir()
    a, b = (make_vllm(tiny_model, socket_dir / name, secret, restarts=n) for name, n in (("a", 1), ("b", 0)))
    try:
        await asyncio.gather(*(engine.start(lambda text: None) for engine in (a, b)))

        # a server dies while both load: the other gets its weights, and its requests in flight go on
        update = WeightUpdate(1, [], source=stream.offer(reference.tensors(1)))
        gate.shut()
        long_one = asyncio.create_task(b.generate("long", PROMPT, SamplingParams(max_tokens=300, seed=3), 50))
        updates = [asyncio.create_task(engine.update_weights(update)) for engine in (a, b)]
        await until(lambda: gate.waiting == 2, patience_s=120)
        a._process.kill()
        with pytest.raises(ServerDown):
            await updates[0]
        gate.opened.set()
        await updates[1]
        versions = {span.version for span in (await long_one).versions}
        assert 1 in versions and versions <= {0, 1}
        await is_served(b, reference, 1)

        # and the first, started again, finds the same offer, much later
        await until(lambda: a.serving, patience_s=900)
        assert a.weight_version == 0
        await a.update_weights(update)
        await is_served(a, reference, 1)

        # the trainer dies while b loads: b may have loaded a half of them, and serves nothing more
        gate.shut()
        update = WeightUpdate(2, [], source=stream.offer(reference.tensors(2)))
        dying = asyncio.create_task(b.update_weights(update))
        await until(lambda: gate.waiting == 1, patience_s=120)
        stream.close()
        gate.opened.set()
        with pytest.raises(InferenceError):
            await dying
        await until(lambda: not group_alive(b._process.pid), patience_s=60)
        with pytest.raises(InferenceError, match="cannot be had from the trainer"):
            await a.update_weights(update)
        await is_served(a, reference, 1)
    finally:
        gate.opened.set()
        stream.close()
        await asyncio.gather(a.stop(), b.stop())
