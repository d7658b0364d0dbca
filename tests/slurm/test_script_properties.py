"""Whatever settings are accepted: a shell reads the script, sbatch reads each option back as it was given, and no value ends
its line or becomes an option of its own."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.validation import setting, validate
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.private.base import PrivateSlurm
from prorl_hpc.slurm.sbatch_options import check_extra, check_sbatch_lines, sbatch_words
from prorl_hpc.slurm.script import components, quoted, render
from prorl_hpc.slurm.setup_checks import setup_problems

OPTIONS = {
    "cluster.account": "account", "cluster.qos": "qos", "cluster.reservation": "reservation",
    "cluster.licenses": "licenses", "cluster.trainer.partition": "partition",
    "cluster.trainer.constraint": "constraint", "cluster.trainer.nodelist": "nodelist",
    "cluster.trainer.exclude": "exclude", "cluster.rollout.account": "account", "cluster.inference.qos": "qos",
}  # fmt: skip
"""Settings of one word, and the options that they become."""
EXTRAS = ("comment", "gres", "exclusive", "dependency", "extra", "mail-type", "chdir")
PIECES = ["a", "gpu[01-04,7]", "a&b|c", "(x*2)", " ", "  ", "'", '"', "\\", "\\'", "#", "$(id)", "`id`", "$HOME", ";", "&&",
          "\n", "\r", "\t", "\0", "\x85", "\u2028", "\u00a0", "é", "\ud800", "--wrap=x", "-o /x", "\n#SBATCH -o /x", "%j",
          "=", ":", ",", "!", "~", "{a,b}", "<", ">", "EOF", ")", "]", ""]  # fmt: skip
TEXT = st.one_of(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), st.text(max_size=8))
WORD = st.one_of(st.sampled_from(["a", "gpu[01-04,7]", "a&b|c", "(x*2)", "m:2,a@s:1", "é"]), TEXT)
VALUE = st.one_of(st.lists(st.sampled_from([p for p in PIECES if p.isprintable()]), min_size=1).map("".join), TEXT)
LINE = st.one_of(
    TEXT,
    st.sampled_from(["export A='b c'", "x=$(date)", "echo \\\\ '#'", "true # it's", "f() { true; }"]),
    st.sampled_from(
        ["export A='b c'", "if true; then", "fi", "cat <<EOF", "EOF", 'echo "', "f() {", "}", "x=$(date)", ":"]
    ),
)
HEAD = st.one_of(
    TEXT,
    TEXT.map(lambda text: f"#SBATCH {text}"),
    TEXT.map(lambda text: f"#SBATCH --comment={text}"),
    TEXT.map(lambda text: f"#BB {text}"),
    st.sampled_from(["#SBATCH -o/x", "#SBATCH -HJ x", "#SBATCH --outp=x", "#SBATCH --comment", "#SBATCH -A"]),
)


@st.composite
def configs(draw: st.DrawFn) -> ProrlConfig:
    config = ProrlConfig()
    config.model.prepare, config.cluster.kind = "tiny", "slurm"
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2, unique=True)):
        group, _, last = name.rpartition(".")
        setattr(setting(config, group), last, draw(WORD))
    config.cluster.extra = draw(st.dictionaries(st.sampled_from(EXTRAS), VALUE, max_size=2))
    config.cluster.inference.extra = draw(st.dictionaries(st.sampled_from(EXTRAS), VALUE, max_size=1))
    config.cluster.setup = draw(st.lists(LINE, max_size=2))
    config.cluster.sbatch_lines = draw(st.lists(HEAD, max_size=1))
    config.cluster.trainer.memory_gib = draw(st.sampled_from([0.0, 1e-6, 1.5, 1e7]))
    return config


def problems(config: ProrlConfig) -> list[str]:
    cluster = config.cluster
    found = [*validate(config), *check_extra("e", cluster.extra), *check_extra("e", cluster.inference.extra)]
    return [*found, *check_sbatch_lines(cluster.sbatch_lines), *setup_problems(cluster)]


def script_of(config: ProrlConfig) -> str:
    parts = components(config.cluster, make_plan(config))
    return render(
        "prorl-x", Path("/runs/x y/jobs"), parts, config.cluster, "/venv/bin/python -m launcher '/runs/x y/jobs'"
    )


def options_given(config: ProrlConfig) -> list[str]:
    """What must be among the script's options."""
    cluster, given = config.cluster, []
    for name, option in OPTIONS.items():
        covered = option in cluster.extra or option in cluster.inference.extra
        if (value := setting(config, name)) and not covered:
            shadowed = all(getattr(getattr(cluster, part), option, "") for part in ("rollout", "inference", "trainer"))
            given += [] if name.count(".") == 1 and shadowed else [f"--{option}={value}"]
    extras = {**cluster.extra, **cluster.inference.extra}
    return given + [f"--{key}={value}" if value else f"--{key}" for key, value in extras.items()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_an_accepted_script_says_what_was_given_and_nothing_else(config: ProrlConfig) -> None:
    if problems(config):
        event("refused")
        return
    event("accepted")
    text, cluster = script_of(config), config.cluster
    plain = ProrlConfig(cluster=type(cluster)(kind="slurm"))
    done = subprocess.run(["bash", "-n", "/dev/stdin"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert text.endswith("\nexec /venv/bin/python -m launcher '/runs/x y/jobs'\n")
    own = [line for line in text.split("\n") if line.startswith("#SBATCH")]
    for line in cluster.sbatch_lines:  # once each, for one may say what a setting says too
        if line in own:
            own.remove(line)
    words = [sbatch_words(line) for line in own]
    assert words == [shlex.split(line.removeprefix("#SBATCH"), comments=True) for line in own]
    assert all(len(found) == 1 for found in words)
    said = [word for (word,) in words]
    assert all(option in said for option in options_given(config)), (options_given(config), said)
    lines = [line for line in script_of(plain).split("\n") if line.startswith("#SBATCH")]
    always = {word.partition("=")[0] for line in lines for word in sbatch_words(line)}
    chosen = {f"--{name}" for name in (*OPTIONS.values(), *EXTRAS, "mem")} | {"hetjob"}
    assert {word.partition("=")[0] for word in said} <= always | chosen
    # nothing but the lines of the settings came in between
    assert (
        len(text.split("\n"))
        == len(own) + len(cluster.sbatch_lines) + len(cluster.setup) + 2 * bool(cluster.setup) + 14
    )
    assert not any(word.startswith("--mem=0") for word in said)
    assert not {f"--{name}" for name in EXTRAS if name != "exclusive"} & set(said)


@given(TEXT.filter(lambda text: "\n" not in text))
def test_a_quoted_word_is_read_alike_by_sbatch_and_a_shell(text: str) -> None:
    assert sbatch_words(f"#SBATCH --comment={quoted(text)}") == [f"--comment={text}"]
    assert shlex.split(quoted(text)) == [text]


@pytest.mark.slurm
def test_sbatch_itself_reads_words_as_we_take_it_to(slurm_mini: PrivateSlurm, tmp_path: Path) -> None:
    texts = ["two words", "it's", 'a\\b "c" $(id) `x` #y', "\\", "'\\'", "%j", "é"]
    lines = [f"#SBATCH --comment={quoted(text)}" for text in texts]
    lines += ["#SBATCH --comment=a#b", r"#SBATCH --comment='a\b'", "#SBATCH--comm=glued", "#SBATCH --comment -H"]
    for line in lines:
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/bash\n{line}\ntrue\n")
        job = said(slurm_mini, "sbatch", "--hold", "--parsable", str(script))
        words: Any = sbatch_words(line)
        value = words[1] if len(words) > 1 else words[0].partition("=")[2]
        assert said(slurm_mini, "squeue", "-h", "-j", job, "-o", "%k") == value
        said(slurm_mini, "scancel", job)


def said(cluster: PrivateSlurm, *command: str) -> str:
    done = cluster.run(list(command))
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()
