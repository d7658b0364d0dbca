"""The main job with all its processes and real parts, in the quick form: here, and on a private Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.status import ProcessState, RunStatus, TrainerStatus
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.trainer.manifest import damage

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
        process.terminate()  # it ends its run; killed, it would leave it
        output, _ = process.communicate(timeout=60)
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


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Of three steps."""
    root = tmp_path_factory.mktemp("whole")
    code, output = finish(launch(root, "trainer.steps=3"))
    assert code == 0, output[-4000:]
    return only_run(root)


def test_a_run_on_this_machine_trains_and_leaves_its_artefacts(whole_run: RunDirectory) -> None:
    assert_artefacts(whole_run, 3)
    assert_checkpoint_loads(whole_run, 3)
    assert damage(whole_run.checkpoints / "step-3") == []
    assert leftovers(whole_run) == []


def test_token_ids_and_logprobs_reach_the_loss_unchanged(whole_run: RunDirectory) -> None:
    """The trainer's own logprobs of the engine's ids agree with the engine's: nothing was tokenized again."""
    for step in metrics(whole_run, "step"):
        assert step["logprob_gap_max"] < 0.01, step


def sampled(run: RunDirectory, batches: set[str]) -> dict[str, tuple[list[int], float]]:
    """Tokens and reward of each rollout."""
    rows = read_rollouts(run, ["rollout_id", "batch_id", "token_ids", "reward"]).to_pylist()
    return {row["rollout_id"]: (row["token_ids"], row["reward"]) for row in rows if row["batch_id"] in batches}


def test_a_seed_reproduces_the_reward_curve(tmp_path: Path, whole_run: RunDirectory) -> None:
    """Token by token. The engine's logprobs differ in their last bits, by who shared a batch with whom."""
    code, output = finish(launch(tmp_path, "trainer.steps=2"))
    assert code == 0, output[-4000:]
    again, batches = only_run(tmp_path), {"eval-0", "step-1", "step-2"}
    ours, theirs = sampled(again, batches), sampled(whole_run, batches)
    assert len(ours) >= 48 + 2 * 4 * 8
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == set()
    rewards = [[step["reward"] for step in metrics(run, "step")[:2]] for run in (again, whole_run)]
    assert rewards[0] == rewards[1]


def wait_for_step(run_root: Path, process: subprocess.Popen[str], step: int, timeout_s: float = 200) -> RunDirectory:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if any(run_root.glob("*/*/config.yaml")):
            run = only_run(run_root)
            if len(metrics(run, "step")) >= step:
                return run
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, output = finish(process, 60)
    raise AssertionError(f"step {step} was not reached in {timeout_s} s; launch printed:\n{output[-4000:]}")


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
    if resumed.poll() is None:
        os.killpg(resumed.pid, signal.SIGINT)
    code, output = finish(resumed, 60)
    assert code == 130, output[-4000:]
    assert step in {m["step"] for m in metrics(run, "step")}
    assert leftovers(run) == []


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else_and_resume_continues(tmp_path: Path) -> None:
    process = launch(tmp_path, "trainer.steps=50")
    run = wait_for_step(tmp_path, process, 2)
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


def kill(run: RunDirectory, name: str) -> int:
    """SIGKILL; returns the process id."""
    state = read_json(run.process_state(name), ProcessState)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    return state.pid


def wait_for_rollouts(run: RunDirectory, process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Until a training batch is under way, with some rollouts done and others not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        status = read_json(run.status_file, RunStatus)
        batches = status.batches if status is not None else []
        if any(b.batch_id.startswith("step-") and b.in_flight and b.rollouts_done for b in batches):
            return
        time.sleep(0.05)
    raise AssertionError("no training batch was seen under way")


def assert_each_rollout_came_once(run: RunDirectory, steps: int) -> None:
    """None was lost, none was made or counted twice: the trajectories on disk are those that the trainer counted."""
    names = ["rollout_id", "batch_id", "group_id", "group_outcome", "status"]
    rows = read_rollouts(run, names).to_pylist()
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    samples = Counter(row["group_id"] for row in rows if row["batch_id"].startswith("step-"))
    assert set(samples.values()) == {run.load_config().trainer.group_size}
    done = Counter(row["batch_id"] for row in rows if row["status"] == "done")
    groups = {row["group_id"]: (row["batch_id"], row["group_outcome"]) for row in rows}
    accepted = Counter(batch for batch, outcome in groups.values() if outcome == "accepted")
    by_step = {m["step"]: m for m in metrics(run, "step")}
    assert list(by_step) == list(range(1, steps + 1))
    for step, record in by_step.items():
        assert done[f"step-{step}"] == record["rollouts"]
        assert accepted[f"step-{step}"] == record["groups_accepted"]


@pytest.mark.parametrize("victim", ["coordinator", "worker-0", "inference-0"])
def test_a_killed_coordinator_worker_or_agent_is_started_again_and_the_run_ends_well(
    tmp_path: Path, victim: str
) -> None:
    process = launch(tmp_path, "trainer.steps=4", "engine=transformers")
    run = wait_for_step(tmp_path, process, 1)
    wait_for_rollouts(run, process)
    pid = kill(run, victim)
    code, output = finish(process)
    assert code == 0, output[-4000:]
    assert f"{victim} was killed by SIGKILL: started again (1 of 3)" in output
    assert_artefacts(run, 4)
    assert_each_rollout_came_once(run, 4)
    assert leftovers(run) == []
    status = read_json(run.status_file, RunStatus)
    assert status is not None
    assert [batch for batch in status.batches if batch.in_flight] == []
    attempts = max(read_rollouts(run, ["attempts"])["attempts"].to_pylist())
    if victim == "coordinator":
        assert attempts == 1, "a coordinator that is started again takes up what the workers hold"
    elif victim == "worker-0":
        assert attempts == 2, "what a dead worker held is tried again"
        assert "which a dead run left" in (run.logs / "worker-0.log").read_text(), f"sandboxes of {pid} are swept"


@pytest.mark.parametrize(
    ("victim", "overrides"),
    [
        ("worker-0", ["run.restarts=0"]),
        ("coordinator", ["run.restarts=0"]),
        ("inference-0", ["run.restarts=0"]),
        ("trainer-0", []),
    ],
)
def test_a_crash_ends_the_run_with_its_name_and_resume_works(tmp_path: Path, victim: str, overrides: list[str]) -> None:
    process = launch(tmp_path, "trainer.steps=50", "trainer.checkpoint_every=1", "engine=transformers", *overrides)
    run = wait_for_step(tmp_path, process, 2)
    kill(run, victim)
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
