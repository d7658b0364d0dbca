"""trainer.publish=direct, from the trainer's side: what is offered, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_rollouts import FakeRollouts
from test_training_loop import a_loop, new_run

from prorl_hpc.inference import streamed_weights
from prorl_hpc.inference.streamed_weights import streamed_tensors
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import WeightProbe, WeightSource
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.trainer.direct_copy import copies, offered
from prorl_hpc.trainer.direct_transfer import DirectPublisher
from prorl_hpc.transport import weight_server
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.transport.weight_server import WeightServer
from prorl_hpc.transport.weight_stream import StreamRefused, read_key

pytestmark = pytest.mark.train
PROBE = WeightProbe([1, 2], [-1.0], 0.05)
TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "half": torch.randn(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
}


class Weights:
    """A crew of one rank whose weights are these."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    async def copy_weights(self) -> list[tuple[str, torch.Tensor]]:
        return copies(self.tensors.items(), keep=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    RunKeys.create(tmp_path / "keys")
    return tmp_path / "keys" / "client.secret"


def taken(source: WeightSource | None, secret: Path) -> dict[str, torch.Tensor]:
    assert source is not None
    return dict(streamed_tensors(source, secret))


async def test_tensors_of_every_kind_arrive_as_they_are(secret: Path) -> None:
    publisher = DirectPublisher(Weights(TENSORS), "127.0.0.1", secret)
    update = await publisher.offer(3, PROBE)
    assert (update.version, update.paths, update.probe) == (3, [], PROBE)
    found = taken(update.source, secret)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    publisher.close()


async def test_training_goes_on_while_an_offer_stands_until_the_next_is_delivered(secret: Path) -> None:
    weights = {"w": torch.zeros(3)}
    publisher = DirectPublisher(Weights(weights), "127.0.0.1", secret)
    first = await publisher.offer(1, PROBE)
    publisher.delivered()
    weights["w"] += 1
    second = await publisher.offer(2, PROBE)
    weights["w"] += 1
    for _ in range(2):  # one that comes late, or again
        assert taken(first.source, secret)["w"].tolist() == [0, 0, 0]
        assert taken(second.source, secret)["w"].tolist() == [1, 1, 1]
    publisher.delivered()
    with pytest.raises(StreamRefused, match="not offered any more"):
        taken(first.source, secret)
    assert taken(second.source, secret)["w"].tolist() == [1, 1, 1]
    publisher.close()
    with pytest.raises(OSError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_weights, "RETRY_S", 0.0)
        taken(second.source, secret)


async def test_a_stream_that_breaks_off_goes_on_where_it_was(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_weights, "RETRY_S", 0.0)
    sent: list[int] = []
    send_all = weight_server.send_all

    def breaks_off(connection: object, data: memoryview) -> None:
        sent.append(len(data))
        if len(sent) in (3, 6):  # in the middle of a tensor
            send_all(connection, data[: len(data) // 2])
            raise ConnectionResetError("a cable")
        send_all(connection, data)

    monkeypatch.setattr(weight_server, "send_all", breaks_off)
    server = WeightServer("127.0.0.1", read_key(secret))
    tensors = {f"t{i}": torch.randn(1000) for i in range(5)}
    found = taken(server.offer([offered(name, tensor) for name, tensor in tensors.items()]), secret)
    assert list(found) == list(tensors) and all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert len(sent) == 10  # three listings, five tensors, two halves
    server.close()


def test_a_rank_without_room_walks_on_and_says_what_to_set() -> None:
    class NoRoom:
        def detach(self) -> NoRoom:
            return self

        def to(self, *args: object, **settings: object) -> None:
            raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes")

    walked: list[str] = []

    def weights():
        for name in "abc":
            walked.append(name)
            yield name, NoRoom()

    with pytest.raises(RunError, match=r"at a: can't allocate .*set trainer\.publish=disk"):
        copies(weights(), keep=True)
    assert walked == ["a", "b", "c"]
    assert copies(weights(), keep=False) == []


async def test_both_ways_train_alike(tmp_path, tiny_model, monkeypatch, commands) -> None:
    rewards = {}
    for way in ("disk", "direct"):
        run = new_run(tmp_path / way, tiny_model, publish=way)
        RunKeys.create(run.keys)
        service = FakeRollouts(tiny_model, secret=run.weight_secret_file)
        async with a_loop(run, service, monkeypatch, commands) as loop:
            await loop.run()
        assert all(bool(update.paths) is (way == "disk") for update in service.updates)
        assert not list(run.weights.iterdir())
        steps = newest_per_step(MetricsLog(run.metrics_file).read(), "step")
        assert all(r["probe_gap"] < 1e-4 for r in steps)
        rewards[way] = [(r["reward"], r["grad_norm"]) for r in steps]
    assert rewards["direct"] == rewards["disk"]
