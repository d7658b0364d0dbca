"""Our own processes in a container: the command line, and runs of fake processes under real Apptainer."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.container import in_container, make_image
from fakes.runs import fake_config, fake_plan, fake_run, processes_of

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.status import ProcessState
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.slurm import own_container
from prorl_hpc.slurm.children import command_of
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import ProcessPlan

TRAINER = ProcessPlan("trainer-0", "trainer", "trainer")
WORKER = ProcessPlan("worker-0", "worker", "worker")
needs_apptainer = pytest.mark.skipif(
    not any(os.access(f"/usr/bin/{name}", os.X_OK) for name in own_container.BINARIES), reason="needs Apptainer"
)


# --- the command line ---


@pytest.fixture
def binary(tmp_path: Path) -> str:
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def wrapped(
    config: ProrlConfig, process: ProcessPlan, binary: str, *, devices: Path = Path("/nowhere"), **environ: str
) -> own_container.Command:
    run = RunDirectory("/runs/demo-1")
    environment = {"PATH": str(Path(binary).parent), **environ}
    return own_container.wrap(command_of(process, run.path), process, config, run, environment, devices)


def test_without_an_image_the_command_stays_as_it_is(binary: str) -> None:
    command = wrapped(ProrlConfig(), TRAINER, binary, HOME="/h", PYTHONPATH="/p")
    assert command.words == command_of(TRAINER, Path("/runs/demo-1"))
    assert command.environ["PYTHONPATH"] == "/p"
    assert not command.leashed


def test_the_command_in_an_image(tmp_path: Path, binary: str) -> None:
    config = ProrlConfig()
    config.run.runtime_root = str(tmp_path)
    config.cluster.trainer.container = "/images/train.sif"
    config.cluster.container.python = "/opt/venv/bin/python"
    config.cluster.container.args = ["--bind", "/scratch"]
    command = wrapped(config, TRAINER, binary)
    assert command.words[:3] == [binary, "-q", "exec"]
    place = command.words.index("/images/train.sif")
    assert command.words[place - 2 : place] == ["--bind", "/scratch"]
    assert command.words[place + 1 :] == ["/opt/venv/bin/python", *command_of(TRAINER, Path("/runs/demo-1"))[1:]]
    assert str(tmp_path) in command.words
    assert command.leashed
    assert not wrapped(config, WORKER, binary).leashed


def test_the_nodes_own_python_and_libraries_stay_outside_and_gpus_do_not(binary: str) -> None:
    config = ProrlConfig()
    config.cluster.container.image = "/images/all.sif"
    leaking = {"PYTHONPATH": "/p", "PYTHONHOME": "/p", "LD_PRELOAD": "/l", "VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c"}
    wanted = {"CUDA_VISIBLE_DEVICES": "MIG-1", "NCCL_DEBUG": "INFO", "https_proxy": "http://p:1", "PRORL_RUN_ID": "r"}
    environ = wrapped(config, TRAINER, binary, **leaking, **wanted).environ
    assert not leaking.keys() & environ.keys()
    assert wanted.items() <= environ.items()
    assert environ["PYTHONNOUSERSITE"] == "1"


@pytest.mark.parametrize(
    ("devices", "args", "flags"),
    [
        ([], [], []),
        (["nvidia0", "nvidiactl"], [], ["--nv"]),
        (["kfd"], [], ["--rocm"]),
        (["nvidia0"], ["--nvccli"], []),
    ],
)
def test_a_nodes_gpu_driver_is_brought_in(
    tmp_path: Path, devices: list[str], args: list[str], flags: list[str]
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    assert own_container.gpu_flags("inference", args, tmp_path) == flags
    assert own_container.gpu_flags("rollout", args, tmp_path) == []


def test_model_files_behind_links_are_bound_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "abc").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (tmp_path / "model").symlink_to("snapshots/1")
    monkeypatch.setenv("NODE_SCRATCH", str(tmp_path / "blobs"))
    config = ProrlConfig()
    config.run.runtime_root = "$NODE_SCRATCH"
    config.model.path = str(tmp_path / "model")
    config.task.train.path = str(tmp_path / "not there.jsonl")
    bound = own_container.paths_of(config, RunDirectory(tmp_path / "run"), {"TMPDIR": str(tmp_path)})
    assert {str(blobs), str(tmp_path / "model"), str(snapshot), str(tmp_path)} <= set(bound)
    assert not any("not there" in path for path in bound)
    (tmp_path / "a:b").mkdir()
    config.model.path = str(tmp_path / "a:b")
    with pytest.raises(RunError, match=r"a:b cannot be bound into a container"):
        own_container.paths_of(config, RunDirectory(tmp_path / "run"), {})


def test_no_container_program(tmp_path: Path) -> None:
    config = ProrlConfig()
    config.cluster.container.image = "/images/all.sif"
    with pytest.raises(RunError, match=r"neither is on PATH.*cluster\.modules"):
        wrapped(config, TRAINER, str(tmp_path / "apptainer"))


# --- under real Apptainer ---


def started(config: ProrlConfig, acts: dict[str, dict[str, Any]]) -> tuple[RunDirectory, Job]:
    run = fake_run(config, acts)
    return run, submit(run, config, fake_plan(config))


@pytest.fixture
def contained(tmp_path: Path) -> ProrlConfig:
    return in_container(fake_config(tmp_path), make_image(tmp_path / "image"))


@needs_apptainer
def test_a_run_in_a_container_goes_its_way_to_the_end(contained: ProrlConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/node")
    acts = {
        "worker-0": {"dump_environment": True},
        "trainer-0": {"exit_after": 1.0, "finish": True, "finish_after_starts": {"worker-0": 1}},
    }
    run, job = started(contained, acts)
    assert job.wait(60)
    assert read_failure(run) is None
    assert {p.stem for p in run.logs.glob("*.stopped")} == {"inference-0", "worker-0", "coordinator"}
    inside = json.loads((run.logs / "worker-0.env.json").read_text())
    assert "APPTAINER_CONTAINER" in inside
    assert "VIRTUAL_ENV" not in inside
    assert processes_of(run) == []
    assert not run.runtime_dir(contained.run.runtime_root).exists()


@needs_apptainer
@pytest.mark.parametrize(("act", "code"), [({"code": 3, "says": "no space left"}, 3), ({"killed": True}, -9)])
def test_how_a_process_in_a_container_died_is_told(contained: ProrlConfig, act: dict[str, Any], code: int) -> None:
    run, job = started(contained, {"worker-0": {"exit_after": 0.2, **act}})
    assert job.wait(60)
    failure = read_failure(run)
    assert failure is not None
    assert (failure.name, failure.exit_code) == ("worker-0", code)
    assert processes_of(run) == []


@needs_apptainer
def test_processes_in_a_container_are_started_again(contained: ProrlConfig) -> None:
    contained.run.restarts = 1
    acts = {
        "inference-0": {"exit_after": 0.4, "killed": True, "deaths": 1, "grandchild": True},
        "trainer-0": {"exit_after": 0.2, "finish": True, "finish_after_starts": {"inference-0": 2}},
    }
    run, job = started(contained, acts)
    assert job.wait(60)
    assert read_failure(run) is None
    assert [str(restart) for restart in read_restarts(run)] == [
        "inference-0 was killed by SIGKILL: started again (1 of 1)"
    ]
    assert processes_of(run) == []


@needs_apptainer
def test_processes_in_a_container_die_with_their_supervisor(contained: ProrlConfig) -> None:
    run, job = started(contained, {"worker-0": {"deaf": True}})
    while not run.process_state("trainer-0").exists():
        assert job.alive()
        time.sleep(0.02)
    state = read_json(run.process_state("trainer-0"), ProcessState)
    assert state is not None
    apptainer = psutil.Process(psutil.Process(state.pid).ppid())
    os.kill(apptainer.ppid(), signal.SIGKILL)
    assert job.wait(15)
    deadline = time.monotonic() + 20
    while left := processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@needs_apptainer
def test_an_image_with_another_version_is_refused(contained: ProrlConfig) -> None:
    contained.cluster.container.args += ["--env", "PRORL_VERSION=0.0.9"]
    run, job = started(contained, {})
    assert job.wait(60)
    failure = read_failure(run)
    assert failure is not None
    assert "the run's is 0.0.9: build cluster.container.image anew" in "\n".join(failure.last_lines)
