"""Lines and options that a site adds to the job, looked at as sbatch, srun and a shell would read them; sizes of no cluster."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.cli import preflight
from prorl_hpc.config.schema import ClusterConfig, ComponentConfig, ProrlConfig
from prorl_hpc.config.validation import setting, validate
from prorl_hpc.slurm.sbatch_options import check_extra, check_sbatch_lines, check_srun_args
from prorl_hpc.slurm.setup_checks import setup_problems


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("#SBATCH -o /x --wrap=y", ["sbatch's --output is decided by the plan", "sbatch's --wrap is decided"]),
        ("#SBATCH -o/x", ["--output"]),
        ("#SBATCH -HN2", ["--nodes"]),
        ("#SBATCH -H -k", ["--no-kill"]),
        ("#SBATCH --outp=/x", ["--output"]),
        ("#SBATCH --'output'=/x", ["--output"]),
        ("#SBATCH\t-J x", ["--job-name"]),
        ("#SBATCH-Jx", ["--job-name"]),
        ("#SBATCH --gres=gpu:1 -t 5", ["use cluster.time_minutes"]),
        ("#SBATCH --parsable", ["must be left out: the job's number is read"]),
        ("#SBATCH -W", ["`prorl-hpc launch` waits by itself"]),
        ("#SBATCH -M other", ["launch it on a login node of the other one"]),
        ("#SBATCH --comment=two words", ["sbatch cannot read 'words', which belongs to no option"]),
        ("#SBATCH --comment='a", ["sbatch misses the closing '"]),
        ("#SBATCH --comment=a\\", ["a backslash at its end"]),
        ("#SBATCH --comment", ["sbatch's --comment needs a value"]),
        ("#SBATCH -A", ["sbatch's -A needs a value"]),
        ("#PBS -N x", ["write what is meant as an #SBATCH line"]),
        ("#SBATCH -A me --gres gpu:1 --exclusive -H  # -o /x", []),
        ("#SBATCH --comment='-o /x' -d \"afterok:1\"", []),
        ("#BB_LUA SBF -o", []),
    ],
)
def test_a_line_for_the_head_of_the_script(line: str, words: list[str]) -> None:
    found = list(check_sbatch_lines([line]))
    assert len(found) == len(words), found
    assert all(line in text.replace("\\\\", "\\").replace("\\t", "\t") or "'" in line for text in found)
    assert all(word in text for word, text in zip(words, found, strict=True)), found


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("--foo bar", "must be one option of srun with its value behind ="),
        ("export", "must be one option of srun"),
        ("--", "must be one option of srun"),
        ("", "must be one option of srun"),
        ("--nodes=2", "srun's --nodes is decided by the plan"),
        ("-N2", "srun's --nodes is decided by the plan"),
        ("--cpu-bind=cores", "use cluster.<component>.cpu_bind"),
        ("--outp=x", "srun's --output"),
    ],
)
def test_a_word_for_srun(given: str, word: str) -> None:
    (found,) = check_srun_args(["--export=ALL", "--comment=two words", "-v", given])
    assert f"cluster.srun_args: {given!r}" in found and word in found


def test_an_option_without_its_value_does_not_take_the_next_line() -> None:
    (found,) = check_extra("cluster.extra", {"comment": "", "exclusive": "", "hold": ""})
    assert found == "cluster.extra.comment is empty: sbatch's --comment needs a value: give one, or leave it out"
    (found,) = check_extra("cluster.extra", {"clusters": "b"})
    assert "launch it on a login node of the other one" in found


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (["export A=1", "echo 'a", "echo"], 'cluster.setup, line 2, "echo \'a": bash cannot read it: unexpected EOF'),
        (["ls )"], "cluster.setup, line 1, 'ls )': bash cannot read it: syntax error near unexpected token `)'"),
        (["if true; then", "echo"], "cluster.setup, line 2, 'echo'"),
        (["echo", "cat <<EOF", "x"], "cluster.setup, line 2, 'cat <<EOF': bash cannot read it: here-document"),
        (["\ud800("], "cluster.setup, line 1"),
    ],
)
def test_a_line_that_no_shell_can_read_is_named(setup: list[str], words: str) -> None:
    (found,) = setup_problems(ClusterConfig(setup=setup))
    assert words in found
    (found,) = setup_problems(ClusterConfig(trainer=ComponentConfig(setup=setup)))
    assert words.replace("cluster.", "cluster.trainer.") in found


def test_lines_that_belong_together_are_read_together() -> None:
    setup = ["if true; then", "  shopt -s extglob", "  ls !(a)", "fi", "cat <<EOF", "it's", "EOF", "# it's"]
    assert list(setup_problems(ClusterConfig(setup=setup))) == []


@pytest.mark.parametrize(
    "override", ["cluster.rollout.nodes=50000000", "rollout.workers_per_node=50000000", "task.train.size=500000000"]
)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_sizes_of_no_cluster_are_answered_before_anything_is_counted_out(
    override: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def counted(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be counted out")

    for name in ("data_problems", "slurm_problems", "wasted"):
        monkeypatch.setattr(preflight, name, counted)
    monkeypatch.setattr("prorl_hpc.cli.launch.make_plan", counted)
    assert main(["launch", "--dry-run", f"cluster={kind}", override]) == 2
    said = capsys.readouterr().err
    assert "must be at most" in said and override in said


def test_every_word_of_a_site_is_checked_before_a_launch() -> None:
    config = ProrlConfig(cluster=ClusterConfig(kind="slurm", sbatch_lines=["#SBATCH -o /x"], srun_args=["--foo bar"]))
    config.cluster.trainer.setup = ["echo '"]
    found = preflight.preflight(config, starting=False)
    for words in ("sbatch's --output", "cluster.srun_args: '--foo bar'", "cluster.trainer.setup, line 1"):
        assert any(words in text for text in found), found


@pytest.mark.parametrize(
    "name", ["run.root", "run.runtime_root", "model.path", "cluster.container.image", "task.train.path"]
)
@pytest.mark.parametrize("text", ["/" + "x" * 300, "/\0", "/\ud800"])
def test_a_path_that_cannot_be_is_answered_without_a_look_at_it(name: str, text: str) -> None:
    config = ProrlConfig()
    config.model.prepare = "tiny"
    group, _, last = name.rpartition(".")
    setattr(setting(config, group), last, text)
    assert preflight.preflight(config, starting=False) == [] or name == "run.root"
    assert any(error.startswith(f"{name}=") for error in validate(config))
