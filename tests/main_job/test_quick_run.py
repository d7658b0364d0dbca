"""The main job with all its processes and real parts, in the quick form: here, and on a private Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import TrainerStatus

pytest.importorskip("deepspeed", reason="the trainer needs the extra [train]")
pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.timeout(600)]

QUICK = ["experiment=quick"]


@pytest.fixture(scope="session", autouse=True)
def tiny_model() -> Path:
    """Launch prepares the model by itself; made here once so that the runs' times are their own."""
    subprocess.run([sys.executable, "-m", "prorl_hpc", "model", "prepare", "tiny"], check=True, timeout=400)
    return prepared_model("tiny")


def launch(root: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prorl_hpc", "launch", *QUICK, f"run.root={root}", *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"launch did not end within {timeout_s} s; it printed:\n{output[-4000:]}")
    return process.returncode, output


def only_run(root: Path) -> RunDirectory:
    runs = [p for p in root.glob("*/*") if (p / "config.yaml").is_file() and not p.is_symlink()]
    assert len(runs) == 1, runs
    return RunDirectory.open(runs[0])


def metrics(run: RunDirectory, kind: str) -> list[dict]:
    if not run.metrics_file.exists():
        return []
    return [m for m in map(json.loads, run.metrics_file.read_text().splitlines()) if m["kind"] == kind]


def leftovers(run: RunDirectory) -> list[str]:
    """Processes, directories and mounts that still bear this run's name."""
    names = [str(run.path), run.runtime_dir("/tmp").name]
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if any(name in line for name in names) and process.pid != os.getpid():
            found.append(f"process {process.pid}: {line[:200]}")
    found += [str(p) for p in (run.runtime_dir("/tmp"),) if p.exists()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if any(n in line for n in names)]
    return found


def assert_artefacts(run: RunDirectory, steps: int) -> None:
    assert [m["step"] for m in metrics(run, "step")] == list(range(1, steps + 1))
    assert len(metrics(run, "eval")) >= 2
    for path in (run.config_file, run.plan_file, run.report_file, run.reward_plot):
        assert path.stat().st_size > 0, path
    assert list(run.tensorboard.glob("events.*"))
    assert list(run.rollouts.glob("*.parquet"))
    names = {p.stem for p in run.logs.glob("*.log")}
    assert {"coordinator", "worker-0", "inference-0", "trainer-0"} <= names
    newest = run.checkpoints / f"step-{steps}"
    assert (newest / "config.json").is_file()
    assert (newest / "tokenizer.json").is_file()
    assert list(newest.glob("*.safetensors"))


def assert_checkpoint_loads(run: RunDirectory, steps: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = run.checkpoints / f"step-{steps}"
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]


def test_a_run_on_this_machine_trains_and_leaves_its_artefacts(tmp_path: Path) -> None:
    code, output = finish(launch(tmp_path, "trainer.steps=3"))
    assert code == 0, output[-4000:]
    run = only_run(tmp_path)
    assert_artefacts(run, 3)
    assert_checkpoint_loads(run, 3)
    assert leftovers(run) == []


def test_token_ids_and_logprobs_reach_the_loss_unchanged(tmp_path: Path) -> None:
    """The trainer's own logprobs of the engine's ids agree with the engine's: nothing was tokenized again."""
    code, output = finish(launch(tmp_path, "trainer.steps=2"))
    assert code == 0, output[-4000:]
    for step in metrics(only_run(tmp_path), "step"):
        assert step["logprob_gap_max"] < 0.01, step


def wait_for_step(run_root: Path, step: int, timeout_s: float = 300) -> RunDirectory:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(run_root.glob("*/*/config.yaml")):
            run = only_run(run_root)
            if len(metrics(run, "step")) >= step:
                return run
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached in {timeout_s} s")


def resume_until(run: RunDirectory, step: int) -> None:
    """Resume, wait for ``step`` to be done, and stop by Ctrl-C."""
    command = [sys.executable, "-m", "prorl_hpc", "resume", str(run.path)]
    resumed = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while (
        step not in {m["step"] for m in metrics(run, "step")} and time.monotonic() < deadline and resumed.poll() is None
    ):
        time.sleep(0.2)
    os.killpg(resumed.pid, signal.SIGINT)
    code, output = finish(resumed, 60)
    assert code == 130, output[-4000:]
    assert step in {m["step"] for m in metrics(run, "step")}
    assert leftovers(run) == []


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else_and_resume_continues(tmp_path: Path) -> None:
    process = launch(tmp_path, "trainer.steps=50")
    run = wait_for_step(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    code, output = finish(process, 60)
    stopped_s = time.monotonic() - started
    assert code == 130, output[-4000:]
    assert leftovers(run) == []
    done = len(metrics(run, "step"))
    assert (run.checkpoints / f"step-{done}" / "config.json").is_file(), sorted(run.checkpoints.iterdir())
    print(f"stopped in {stopped_s:.1f} s after step {done}")

    resume_until(run, done + 2)
    steps = [m["step"] for m in metrics(run, "step")]
    assert steps == list(range(1, len(steps) + 1)), "resume repeats or skips no step"


@pytest.mark.parametrize("victim", ["worker-0", "inference-0", "trainer-0", "coordinator"])
def test_a_crash_ends_the_run_with_its_name_and_resume_works(tmp_path: Path, victim: str) -> None:
    process = launch(tmp_path, "trainer.steps=50", "trainer.checkpoint_every=1", "engine=transformers")
    run = wait_for_step(tmp_path, 2)
    pid = json.loads(run.process_state(victim).read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process, 90)
    assert code == 1, output[-4000:]
    assert victim in output
    assert "resume" in output
    assert leftovers(run) == []
    status = read_json(run.trainer_status_file, TrainerStatus)
    assert status is not None
    assert status.step >= 1
    done = max(int(p.name.split("-")[1]) for p in run.checkpoints.glob("step-*"))
    assert done >= 1
    resume_until(run, done + 2)


@pytest.mark.slurm
def test_a_run_on_slurm_is_one_heterogeneous_job_with_the_same_artefacts(tmp_path: Path, slurm_namespaced) -> None:
    cluster = slurm_namespaced
    shared = Path(cluster.shared) / "quick"
    shared.mkdir()
    command = [
        sys.executable, "-m", "prorl_hpc", "launch", *QUICK, f"run.root={shared}", "trainer.steps=3", "cluster=slurm",
        "cluster.rollout.partition=cpu", "cluster.inference.partition=gpu", "cluster.trainer.partition=gpu",
    ]  # fmt: skip
    result = cluster.run(command, timeout_s=500)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    run = only_run(shared)
    assert_artefacts(run, 3)
    nodes = {json.loads(p.read_text())["node"] for p in run.state.glob("*-0.json")}
    assert len(nodes) == 3, nodes
    endpoints = json.loads(run.process_state("coordinator").read_text())["endpoints"]
    assert endpoints["zmq_tcp"].startswith("tcp://10.77.0.")
