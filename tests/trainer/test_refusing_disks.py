"""A full disk elsewhere than where checkpoints lie: published weights, numbers, the trainer's status."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from fake_rollouts import FakeRollouts
from test_training_loop import a_loop, new_run

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.trainer import weights
from prorl_hpc.trainer.metric_writers import open_writers
from prorl_hpc.trainer.publish import WeightDirectory

pytestmark = pytest.mark.train
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(ProrlConfig(run=RunSettings(root=str(tmp_path))))


def full_disks(monkeypatch, is_full):
    """No file of weights can be written for which ``is_full(path)``."""
    save = weights.save_file

    def refuse(tensors, path, metadata):
        if is_full(Path(path)):
            raise FULL
        save(tensors, path, metadata)

    monkeypatch.setattr(weights, "save_file", refuse)


async def test_weights_for_which_memory_has_no_room_any_more_go_to_the_run(
    tmp_path, tiny_model, monkeypatch, commands, caplog
):
    run = new_run(tmp_path, tiny_model, steps=3, checkpoint_every=99)
    memory = run.runtime_dir("/dev/shm")
    full_disks(monkeypatch, lambda path: memory in path.parents and "version-3" in str(path))
    service = FakeRollouts(tiny_model)
    async with a_loop(run, service, monkeypatch, commands) as loop:
        await loop.run()
        assert [Path(u.paths[0]).parent for u in service.updates] == [
            *(memory / f"version-{v}" for v in (1, 2)),
            *(run.weights / f"version-{v}" for v in (3, 4)),
        ]
        assert not list(memory.iterdir()), "older versions go there too"
    assert (
        f"{memory} has no room for weights 3" in caplog.text and f"they go to {run.weights} from now on" in caplog.text
    )
    assert not memory.exists() and not list(run.weights.iterdir())


async def test_no_room_anywhere_is_told_with_the_place_and_the_sizes(tmp_path, tiny_model, monkeypatch, commands):
    run = new_run(tmp_path, tiny_model, steps=3)
    full_disks(monkeypatch, lambda path: "version-2" in str(path))
    async with a_loop(run, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        told = (
            rf"weights 2 cannot be written to {run.weights}.*No space left.*need \d\.\d\d GiB.* has \d+\.\d\d GiB free"
        )
        with pytest.raises(RunError, match=told):
            await loop.run()


async def test_a_directory_that_cannot_be_made_counts_as_full(run, monkeypatch):
    directory = WeightDirectory(run, single_node=True, weight_bytes=10)
    shutil.rmtree(directory.path)

    async def write(path: Path) -> list[Path]:
        return [path / "model.safetensors"]

    assert await directory.write(1, write) == [run.weights / "version-1" / "model.safetensors"]
    directory.close()


def test_only_versions_are_cleared_away(run, tmp_path):
    for name in ("version-abc", "version-", "other", "version-²"):
        (run.weights / name).mkdir()
    (run.weights / "version-1").symlink_to(tmp_path)
    (run.weights / "version-2").write_text("x")
    WeightDirectory(run, single_node=False, weight_bytes=10)
    assert sorted(p.name for p in run.weights.iterdir()) == ["other", "version-", "version-abc", "version-²"]
    assert tmp_path.exists()


# --- numbers ---


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "step": number, "time": float(number), "loss": 0.5}


def test_lines_that_the_disk_refuses_are_written_when_it_takes_them(run, monkeypatch, caplog):
    append = MetricsLog.append
    full = {2, 3}

    def refuse(self, record):
        if record["step"] in full:
            raise FULL
        append(self, record)

    monkeypatch.setattr(MetricsLog, "append", refuse)
    with open_writers(run.load_config(), run) as writers:
        for number in (1, 2, 3):
            writers.write(step(number))
        assert [r["step"] for r in writers.log.read()] == [1]
        full.clear()
        writers.write(step(4))
        assert [r["step"] for r in writers.log.read()] == [1, 2, 3, 4]
        full.add(5)
        writers.write(step(5))
        full.clear()
    assert [r["step"] for r in MetricsLog(run.metrics_file).read()] == [1, 2, 3, 4, 5]
    assert f"{run.metrics_file} takes no more lines" in caplog.text and "2 wait" in caplog.text


def test_lines_that_are_lost_in_the_end_are_told(run, monkeypatch, caplog):
    def refuse(self, record):
        raise FULL

    monkeypatch.setattr(MetricsLog, "append", refuse)
    with open_writers(run.load_config(), run) as writers:
        writers.write(step(7))
    assert "lost: step 7" in caplog.text


def test_training_goes_on_without_tensorboard(run, monkeypatch, caplog):
    from torch.utils.tensorboard import SummaryWriter

    def refuse(self):
        raise FULL

    monkeypatch.setattr(SummaryWriter, "flush", refuse)
    monkeypatch.setattr(SummaryWriter, "close", refuse)
    with open_writers(run.load_config(), run) as writers:
        writers.write(step(1))
        writers.write(step(2))
    assert [r["step"] for r in MetricsLog(run.metrics_file).read()] == [1, 2]
    assert caplog.text.count("TensorBoard gets no more numbers") == 1


async def test_training_goes_on_without_a_status(tmp_path, tiny_model, monkeypatch, commands, caplog):
    def refuse(path, value):
        raise FULL

    monkeypatch.setattr("prorl_hpc.trainer.progress.write_json", refuse)
    run = new_run(tmp_path, tiny_model, steps=1)
    async with a_loop(run, FakeRollouts(tiny_model), monkeypatch, commands) as loop:
        await loop.run()
        assert loop.position.step == 1
    assert f"{run.trainer_status_file} cannot be written" in caplog.text
