"""Words at the tab key."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.cli.completion import candidates, main
from prorl_hpc.cli.completion_runs import FLAGS
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.run_index import register_run
from prorl_hpc.slurm.steps import PlacedNode


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lau"], ["launch"]),
        (["launch", "clus"], ["cluster.", "cluster="]),
        (["launch", "cluster=sl"], ["cluster=slurm"]),
        (["launch", "-m", "engine=vllm,tr"], ["engine=vllm,transformers"]),
        (["launch", "trainer.ste"], ["trainer.steps="]),
        (["launch", "cluster.rollout.no"], ["cluster.rollout.nodelist=", "cluster.rollout.nodes="]),
        (["serve", "sandbox.network="], ["sandbox.network=host", "sandbox.network=none"]),
        (["launch", "trainer.enabled="], ["trainer.enabled=false", "trainer.enabled=true"]),
        (["launch", "+engine.en"], ["+engine.env="]),
        (["launch", "--dr"], ["--dry-run"]),
        (["launch", "--cfg", ""], ["all", "hydra", "job"]),
        (["launch", "model.path=/"], []),
        (["launch", "no.such."], []),
        (["launch", "no.such=x"], []),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["doctor", "--o"], ["--on-nodes"]),
        (["doctor", "cluster=sl"], ["cluster=slurm"]),
        (["stop", "--"], ["--drain", "--help", "--now"]),
        (["stop", "--drain", ""], []),
        (["resume", "latest", "trainer.ste"], ["trainer.steps="]),
        (["resume", "trainer.ste"], ["trainer.steps="]),
        (["logs", "no-such-run", "-c", ""], []),
        (["attach", "no-such-run", ""], []),
        (["dev", "cluster", "cr"], ["crash"]),
        (["simulate", ""], []),
        (["bench", "sc"], ["scaling"]),
        (["bench", "scaling", "workload=m"], ["workload=math-like", "workload=mixed"]),
        (["bench", "scaling", "rollout"], ["rollout.", "rollout=", "rollouts="]),
        (["bench", "scaling", "--p"], ["--private"]),
        (["bench", "scaling", "nodes="], []),
    ],
)
def test_candidates(words: list[str], expected: list[str]) -> None:
    assert candidates(words) == expected


def test_runs_and_groups_of_ones_own_are_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path / "conf"))
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "mysite.yaml").write_text("kind: slurm\n")
    assert candidates(["launch", "cluster=my"]) == ["cluster=mysite"]
    config = ProrlConfig()
    config.run.root, config.run.name = str(tmp_path / "runs"), "mine"
    run = RunDirectory.create(config)
    register_run(run)
    assert candidates(["status", "mi"]) == [run.run_id]
    assert candidates(["status", run.run_id, ""]) == []


def test_what_a_run_has_is_offered_to_logs_and_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProrlConfig()
    config.run.root = str(tmp_path / "runs")
    run = RunDirectory.create(config)
    run.begin_attempt(1)
    run.begin_attempt(2)
    register_run(run)
    write_json(run.plan_file, make_plan(config))
    newest = RunDirectory(run.path, 2)
    for name in ("coordinator.log", "worker-0.log", "srun-0.log"):
        (newest.logs / name).touch()
    assert candidates(["attach", run.run_id, ""]) == []  # nothing is placed yet
    write_json(newest.placement_file, [PlacedNode(0, "rollout", "cpu01", 0)])
    for words in (["logs", run.run_id, "-c", ""], ["logs", "--component", ""]):
        assert candidates(words) == [
            *("coordinator", "inference", "rollout", "srun-0", "trainer", "worker-0"),
        ]
    assert candidates(["logs", run.run_id, "--attempt", ""]) == ["1", "2"]
    assert candidates(["attach", run.run_id, "c"]) == ["coordinator", "cpu01"]
    assert candidates(["attach", run.run_id, "-c", ""]) == []


@pytest.mark.parametrize("verb", [*FLAGS, "doctor"])
def test_flags_of_a_verb_are_those_that_its_help_knows(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prorl_hpc", verb, "--help"], capture_output=True, text=True, timeout=60
    )
    assert candidates([verb, "-"]) == sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", done.stdout)))


def test_actions_of_a_cluster_are_those_that_its_help_knows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prorl_hpc", "dev", "cluster", "--help"], capture_output=True, text=True, timeout=60
    )
    assert all(action in done.stdout for action in candidates(["dev", "cluster", ""]))


@pytest.mark.parametrize("verb", ["model", "image", "bench", "dev"])
def test_actions_of_a_verb_are_those_that_its_help_knows(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prorl_hpc", verb, "--help"], capture_output=True, text=True, timeout=60
    )
    actions = candidates([verb, ""])
    assert actions and all(action in done.stdout for action in actions)


def test_no_configuration_is_composed_for_it() -> None:
    program = (
        "import sys; from prorl_hpc.cli.completion import candidates as c; c(['launch', 'cluster=']); c(['launch', ''])\n"
        "print([name for name in ('hydra', 'torch', 'rich', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "reply"),
    [("prorl-hpc lau", "launch"), ("prorl-hpc launch cluster=sl", "slurm"), ("prorl-hpc completion z", "zsh")],
)
def test_bash_completes(tmp_path: Path, line: str, reply: str) -> None:
    command = tmp_path / "prorl-hpc"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m prorl_hpc "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(prorl-hpc completion bash)"\n'
        f'COMP_LINE="{line}" COMP_POINT={len(line)}; _prorl_hpc 2>/dev/null; echo "${{COMPREPLY[*]}}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{reply}\n", done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_sound(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    script = capsys.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    assert subprocess.run([shell, "-n"], input=script, text=True, timeout=20).returncode == 0


def test_an_unknown_shell_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tcsh"]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err
