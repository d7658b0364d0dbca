"""Hydra as its users expect it, and what is told when a word is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_hpc.cli import launch
from prorl_hpc.cli.composition import Composed, compose_all
from prorl_hpc.cli.launch_help import first_comment, group_choices, help_text
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import conf_dir
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.plan import Plan


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_all(list(words), launch.OWN_FLAGS)
    return str(caught.value)


def test_all_words_that_are_wrong_are_told_at_once() -> None:
    text = told(
        "clustr=slurm", "cluster=slrum", "trainer.stps=3", "trainer.steps=abc", "+trainer.foo=1", "foo", "steps=1"
    )
    assert text.startswith("7 things are wrong:")
    for words in (
        "there is no setting clustr; did you mean cluster?",
        "did you mean cluster=slurm?",
        "did you mean trainer.steps?",
        "trainer.steps: Value 'abc'",
        "there is no setting trainer.foo",
        "'foo' is not an override",
        "there is no setting steps; did you mean trainer.steps?",
    ):
        assert words in text


def test_errors_of_a_sweep_and_of_a_printed_configuration_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert told("--multirun", "cluster=local,slrum", "trainer.stps=1,2").startswith("2 things are wrong")
    assert told("--cfg", "job", "cluster=slrum", "trainer.stps=1").startswith("2 things are wrong")
    assert capsys.readouterr().out == ""


def test_several_values_without_multirun_are_told_the_flag() -> None:
    assert told("trainer=grpo,rloo") == (
        "trainer=grpo,rloo: several values are a run for each, and need -m: `prorl-hpc launch -m trainer=grpo,rloo …`"
    )
    assert "A list is written trainer.steps=[1,2]" in told("trainer.steps=1,2")
    assert "need -m: `prorl-hpc launch -m trainer.steps=range(1,3) …`" in told("trainer.steps=range(1,3)")
    assert told("trainer=grpo,rloo", "engine.env.A=1,2", "trainer.stps=1").startswith("3 things are wrong:")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--dryrun", "--dry-run"), ("--dry", "--dry-run"), ("--detached", "--detach"), ("--multi-run", "--multirun")],
)
def test_a_flag_that_is_wrong_is_answered_with_the_nearest(flag: str, meant: str) -> None:
    assert f"there is no flag {flag}; did you mean {meant}?" in told(flag)


def test_flags_may_stand_anywhere(tmp_path: Path) -> None:
    words = ["trainer.steps=1,2", "--multirun", "run.name=a", "-cd", str(tmp_path), "run.seed=3"]
    assert [(c.config.trainer.steps, c.config.run.seed) for c in compose_all(words)] == [(1, 3), (2, 3)]
    assert "there is no flag -x" in told("trainer.steps=1", "-x")


def test_a_directory_of_groups_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path / "no"))
    assert "PRORL_CONF_DIR" in told("trainer.steps=1")
    monkeypatch.delenv("PRORL_CONF_DIR")
    assert "--config-dir" in told("--config-dir", str(tmp_path / "no"))


def test_a_choice_that_ours_hides_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "slurm.yaml").write_text("kind: slurm\naccount: mine\n")
    (entry,) = compose_all([f"--config-dir={tmp_path}", "cluster=slurm"])
    assert entry.config.cluster.account == ""
    assert f"{tmp_path}/cluster/slurm.yaml is not used, since cluster=slurm is ours" in capsys.readouterr().err


def test_help_shows_every_group_choice_and_setting_with_a_line_of_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("# The cluster in the cellar. It is old.\nkind: slurm\n")
    text = help_text(ProrlConfig(), tmp_path)
    assert "mine                  The cluster in the cellar\n" in text
    for group, choices in group_choices().items():
        assert f"\n  {group}\n" in text
        for choice, path in choices.items():
            assert first_comment(path), f"{path} says nothing of itself"
            assert f"\n    {choice} " in text
    assert "cluster.requeue=true" in text and "Go on in the same job after a time limit" in text
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == set(group_choices())


def test_help_and_dry_run_load_nothing_that_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys, prorl_hpc.__main__ as m\n"
        "codes = [m.main(['launch', '--help']), m.main(['launch', 'model=tiny', 'cluster=slurm', '--dry-run'])]\n"
        "heavy = ('torch', 'vllm', 'transformers', 'deepspeed', 'matplotlib', 'ray')\n"
        "print([name for name in heavy if name in sys.modules], codes)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    # 2: there is an sbatch here, and no Slurm that answers it
    assert done.stdout.splitlines()[-1] in ("[] [0, 0]", "[] [0, 2]"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("cluster.extra.wckey=rl", lambda c: c.cluster.extra == {"wckey": "rl"}),
        ("rollout.policy_weights={policy: 3, b: 1}", lambda c: c.rollout.policy_weights == {"policy": 3.0, "b": 1.0}),
        ("agent.env.PATH=/a/bin:/bin", lambda c: c.agent.env == {"PATH": "/a/bin:/bin"}),
        ("engine.script.token_s=0.1", lambda c: c.engine.script == {"token_s": 0.1}),
        ("task.options.kwargs.size=4", lambda c: c.task.options["kwargs"] == {"size": 4}),
        ("trainer.deepspeed.a.b=1", lambda c: c.trainer.deepspeed == {"a": {"b": 1}}),
        ("policies.b.model.path=/b", lambda c: c.policies["b"].model.path == "/b"),
        ("+engine.env.A=1", lambda c: c.engine.env == {"A": "1"}),
    ],
)
def test_settings_that_take_any_name_take_new_ones(word: str, found: Callable[[ProrlConfig], bool]) -> None:
    (entry,) = compose_all([word])
    assert found(entry.config) and entry.overrides == [word]


def test_a_sweep_over_a_new_name_is_told_as_it_was_given() -> None:
    sweep = compose_all(["--multirun", "engine.env.A=1,2"])
    assert [(entry.config.engine.env, entry.overrides) for entry in sweep] == [
        ({"A": "1"}, ["engine.env.A=1"]),
        ({"A": "2"}, ["engine.env.A=2"]),
    ]


def sweep_of(*names: str) -> list[Composed]:
    configs = [ProrlConfig() for _ in names]
    for name, config in zip(names, configs, strict=True):
        config.model.path = "/no/model"
        config.run.name = name
    return [Composed(config, [f"run.name={config.run.name}"]) for config in configs]


def test_a_run_of_a_sweep_that_is_refused_is_named_and_the_others_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
        if config.run.name == "b":
            raise ConfigError("Slurm refused the job: too many")
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prorl_hpc.cli.preflight.preflight", lambda config, *, starting: [])
    code = launch.start_all(sweep_of("a", "b", "c"), dry_run=False, detach=True, attempt=attempt)
    said = capsys.readouterr()
    assert code == 2
    assert "Slurm refused the job: too many" in said.err
    assert "sweep: 2 of 3 runs submitted\n  exit code 2: run.name=b\n" in said.out
    assert sorted(path.name[0] for path in tmp_path.glob("runs/20*/*")) == ["a", "c"]
    assert (tmp_path / "runs" / "latest").resolve().name.startswith("c-")


def test_what_is_wrong_with_some_runs_of_a_sweep_says_with_which_and_none_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prorl_hpc.cli.preflight.preflight", lambda config, *, starting: [])
    assert launch.start_all(sweep_of("a", "b/c"), dry_run=False, detach=True) == 2
    assert "(in run.name=b/c)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_refused_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    def refuse(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
        assert run.path.is_dir() and (tmp_path / "new" / "runs" / "latest").resolve() == run.path
        raise ConfigError("no")

    monkeypatch.chdir(tmp_path)
    (entry,) = sweep_of("a")
    entry.config.run.root = "new/runs"
    before: set[Path] = set()
    if earlier:
        launch.launch(entry, detach=True, attempt=lambda *_, **__: 0)
        before = {*tmp_path.rglob("*")}
    with pytest.raises(ConfigError):
        launch.launch(entry, detach=True, attempt=refuse)
    assert {*tmp_path.rglob("*")} == before
    if earlier:
        assert (tmp_path / "new" / "runs" / "latest").is_dir()


def test_what_is_wrong_in_a_file_of_the_users_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prorl_hpc.cli.preflight.preflight", lambda config, *, starting: [])
    file = tmp_path / "agent" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("kind: remote\nname: mine\ncommand: [a]\n")
    words = [f"--config-dir={tmp_path}", "model=tiny", "agent=mine", "trainer.steps=0"]
    assert launch.main([*words, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"  - {file}: agent.kind=remote: must be one of" in told and "  - trainer.steps=0: must be" in told
    assert launch.main([*words, "agent.kind=other", "--dry-run"]) == 2
    assert "  - agent.kind=other: must be" in capsys.readouterr().err, "it is the command line's fault"
