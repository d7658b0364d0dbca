"""docs/slurm.md names only what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from prorl_hpc.__main__ import VERBS
from prorl_hpc.cli.dev import _parser
from prorl_hpc.config.schema import ComponentConfig, ProrlConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "slurm.md").read_text()


def test_its_settings_exist() -> None:
    config = ProrlConfig()
    named = set(re.findall(r"`((?:cluster|run|rollout)\.[a-z_]+(?:\.[a-z_]+)*)[`=]", TEXT))
    assert len(named) > 15
    for name in named:
        place: Any = config
        for part in name.split("."):
            if isinstance(place, dict):  # takes any name
                break
            assert hasattr(place, part), name
            place = getattr(place, part)
    for part in re.findall(r"cluster\.<component>\.([a-z_]+)", TEXT):
        assert part in {field.name for field in dataclasses.fields(ComponentConfig)}


def test_its_files_exist() -> None:
    scripts = set(re.findall(r"`(sbatch/[a-z_]+\.(?:sbatch|sh))`", TEXT))
    assert scripts == {f"sbatch/{path.name}" for path in (ROOT / "sbatch").iterdir()}
    for name in re.findall(r"^\| `(site_[a-z_]+)`", TEXT, re.MULTILINE):
        assert (ROOT / "conf" / "cluster" / f"{name}.yaml").exists(), name
    for link in re.findall(r"\]\(([a-z-]+\.md)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


def test_its_verbs_exist() -> None:
    said = set(re.findall(r"prorl-hpc ([a-z]+)", TEXT)) | set(re.findall(r"^\| `([a-z]+)[ `]", TEXT, re.MULTILINE))
    assert said <= set(VERBS), said - set(VERBS)


def test_its_options_of_dev_cluster_exist() -> None:
    start = _parser()._subparsers._group_actions[0].choices["start"]  # type: ignore[union-attr,index,call-overload]
    table = TEXT.partition("| option of `start` |")[2].partition("\n\n")[0]
    options = re.findall(r"--[a-z][a-z-]+", table)
    assert len(options) >= 8
    assert set(options) <= set(start._option_string_actions)


def test_its_site_file_is_one() -> None:
    block = TEXT.partition("```yaml\n")[2].partition("```")[0]
    cluster = ProrlConfig().cluster
    for key, value in yaml.safe_load(block).items():
        assert hasattr(cluster, key), key
        for inner in value if isinstance(value, dict) else ():
            assert hasattr(getattr(cluster, key), inner), f"{key}.{inner}"
