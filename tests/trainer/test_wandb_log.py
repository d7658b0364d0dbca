"""W&B for real, offline."""

from __future__ import annotations

import importlib.util
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.metric_writers import open_writers
from prorl_hpc.trainer.wandb_log import run_id

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is missing: pip install 'prorl_hpc[wandb]'"
)


def new_run(root: Path, mode: str) -> RunDirectory:
    return RunDirectory.create(
        ProrlConfig(run=RunSettings(root=str(root)), trainer=TrainerConfig(wandb=mode, wandb_project="tests"))
    )


def step(number: int, reward: float) -> dict:
    return {"kind": "step", "step": number, "time": 1.0, "reward": reward, "seconds": {"total": 2.0}, "failures": {}}


def rows(offline_run: Path) -> tuple[str, list[dict[str, float]]]:
    """The run's id and what was logged, from its own file."""
    from wandb.proto import wandb_internal_pb2

    (file,) = offline_run.glob("run-*.wandb")
    deadline = time.monotonic() + 60
    while True:  # W&B's own process writes it to the end after it has answered
        found = []
        for data in records(file.read_bytes()):
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(data)
        kinds = [record.WhichOneof("record_type") for record in found]
        if "exit" in kinds:
            break
        assert time.monotonic() < deadline, kinds
        time.sleep(0.05)
    identity = found[kinds.index("run")].run.run_id
    logged = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(i.nested_key) or i.key: float(i.value_json) for i in record.history.item}
            logged.append(row | {"row": float(record.history.step.num)})
    return identity, logged


def records(content: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format behind a header of 7 bytes: checksum, length, type (1 whole; 2, 3, 4 first, middle, last part) and
    data, in blocks of 32 KiB."""
    place, held = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, part = struct.unpack_from("<HB", content, place + 4)
        held += content[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            yield held
            held = b""


def test_every_attempt_goes_on_with_one_run_in_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, "")  # so that what WandbLog sets is taken back
        monkeypatch.delenv(name)
    run = new_run(tmp_path / "runs", "offline")
    config = run.load_config()
    with open_writers(config, run) as writers:
        for number in (1, 2, 3):
            writers.write(step(number, 0.1 * number))
    time.sleep(1.1)  # W&B names the files of an attempt by the second
    # The next attempt begins at the checkpoint of step 1.
    with open_writers(config, run) as writers:
        writers.write(step(2, 0.25))
        writers.write({"kind": "eval", "step": 2, "time": 2.0, "reward": 0.5, "seconds": 1.0})
    first, second = (rows(path) for path in sorted((run.path / "wandb").glob("offline-run-*")))
    assert first[0] == second[0] == run_id(run) == run.run_id
    logged = [*first[1], *second[1]]
    assert [row["row"] for row in logged] == [0, 1, 2, 3, 4], "rows rise over attempts"
    assert [row["trained_steps"] for row in logged] == [1, 2, 3, 2, 2]
    assert [row.get("step/reward") for row in logged[:4]] == pytest.approx([0.1, 0.2, 0.3, 0.25])
    assert logged[4]["eval/reward"] == 0.5 and logged[0]["step/seconds/total"] == 2.0
    assert list(run.tensorboard.glob("events*")), "the other writers go on beside it"
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").rglob("*wandb*"))


def test_without_a_login_it_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = new_run(tmp_path / "runs", "online")
    told = r"trainer\.wandb=online.*WANDB_API_KEY.*trainer\.wandb=offline"
    with pytest.raises(RunError, match=told), open_writers(run.load_config(), run):
        pass


def test_the_id_has_letters_that_are_taken(tmp_path):
    class Named:
        run_id = "my run: 100 %/demo-1a2b3c"

    assert run_id(Named()) == "my-run--100---demo-1a2b3c"
