from __future__ import annotations

import stat
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate, WeightUpdated
from prorl_hpc.trainer.publish import WeightDirectory, announce, probe_tokens
from prorl_hpc.trainer.served_weights import probe_tolerance

PROBE = WeightProbe([1, 2, 3], [-1.0, -2.0], 0.05)


class Answers:
    """A service that answers every update alike."""

    def __init__(self, *answers: WeightUpdated) -> None:
        self.answers = list(answers)
        self.updates: list[WeightUpdate] = []

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        self.updates.append(update)
        return self.answers


async def test_the_largest_gap_of_all_servers_is_returned():
    service = Answers(WeightUpdated(3, "inference-0", 1.0, 0.01), WeightUpdated(3, "inference-1", 1.0, 0.02))
    assert await announce(service, WeightUpdate(3, ["/w/model.safetensors"], PROBE)) == 0.02
    assert service.updates == [WeightUpdate(3, ["/w/model.safetensors"], PROBE)]


async def test_an_engine_that_cannot_score_is_taken_at_its_word():
    assert await announce(Answers(WeightUpdated(3, "inference-0", 1.0)), WeightUpdate(3, [], PROBE)) is None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (WeightUpdated(3, "inference-1", 1.0, None, "no such file"), "inference-1: no such file"),
        (WeightUpdated(2, "inference-1", 1.0, 0.0), "inference-1 serves version 2"),
        (WeightUpdated(3, "inference-1", 1.0, 0.4), r"inference-1 says .* differ .* by 0.4 nats .*probe_tolerance"),
        (WeightUpdated(3, "inference-1", 1.0, float("nan")), "inference-1 says .* by nan"),
    ],
)
async def test_one_server_without_the_weights_ends_the_run(answer, complaint, monkeypatch):
    monkeypatch.setattr("prorl_hpc.trainer.publish.ASK_AGAIN_S", 0.0)
    with pytest.raises(RunError, match=complaint):
        await announce(Answers(WeightUpdated(3, "inference-0", 1.0, 0.01), answer), WeightUpdate(3, [], PROBE))


async def test_nobody_to_publish_to_is_an_error():
    with pytest.raises(RunError, match="no inference server"):
        await announce(Answers(), WeightUpdate(3, [], PROBE))


class OneByOne(Answers):
    """Each answer once."""

    def __init__(self, *told: list[WeightUpdated]) -> None:
        super().__init__()
        self.told = iter(told)

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        self.answers = next(self.told)
        return await super().update_weights(update)


HERE = WeightUpdated(3, "inference-0", 1.0, 0.01)
LOST = WeightUpdated(3, "inference-1", 1.0, error="the server was lost", lost=True)


async def test_the_servers_that_are_there_suffice_but_one_must_be(monkeypatch, caplog):
    monkeypatch.setattr("prorl_hpc.trainer.publish.ASK_AGAIN_S", 0.0)
    service = OneByOne([], [LOST], [HERE, LOST])
    assert await announce(service, WeightUpdate(3, [], PROBE), patience_s=60) == 0.01
    assert len(service.updates) == 3
    assert "served without inference-1: the server was lost" in caplog.text
    with pytest.raises(RunError, match="no inference server came to load them within 0 s"):
        await announce(Answers(LOST), WeightUpdate(3, [], PROBE))


async def test_a_server_that_fails_while_it_dies_is_asked_again(monkeypatch):
    monkeypatch.setattr("prorl_hpc.trainer.publish.ASK_AGAIN_S", 0.0)
    dying = WeightUpdated(3, "inference-1", 1.0, error="the engine is gone")
    for later in ([HERE, LOST], [HERE, WeightUpdated(3, "inference-1", 1.0, 0.02)]):
        await announce(OneByOne([HERE, dying], later), WeightUpdate(3, [], PROBE))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(ProrlConfig(run=RunSettings(root=str(tmp_path))))


@pytest.mark.parametrize("single_node", [True, False])
def test_the_newest_two_versions_are_kept_privately_and_all_go_in_the_end(run, single_node):
    directory = WeightDirectory(run, single_node=single_node, weight_bytes=10)
    assert (directory.path == run.weights) is not single_node
    for version in (9, 10, 11):
        (directory.version(version) / "model.safetensors").write_bytes(b"w")
        directory.remove_older()
    assert sorted(p.name for p in directory.path.iterdir()) == ["version-10", "version-11"]
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    assert directory.path.exists() is not single_node
    assert not list(run.weights.iterdir())


def test_without_room_in_memory_the_weights_go_to_the_run(run):
    assert WeightDirectory(run, single_node=True, weight_bytes=10**15).path == run.weights


def test_the_probe_is_short_and_fixed(tiny_model):
    assert probe_tokens(tiny_model) == probe_tokens(tiny_model)
    assert 2 <= len(probe_tokens(tiny_model)) <= 24


def test_the_probe_leaves_room_for_the_rounding_of_what_engine_and_trainer_compute_in() -> None:
    config = ProrlConfig()
    for engine, trainer, given, tolerance in [
        ("float32", "float32", 0.0, 0.05),
        ("bfloat16", "float32", 0.0, 0.5),
        ("float32", "bfloat16", 0.0, 0.5),
        ("bfloat16", "bfloat16", 0.1, 0.1),
    ]:
        config.engine.dtype, config.trainer.dtype, config.trainer.probe_tolerance = engine, trainer, given
        assert probe_tolerance(config) == tolerance
