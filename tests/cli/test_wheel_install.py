"""What is in the wheel is enough: installed elsewhere, the command line works in an empty directory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``prorl-hpc`` of a virtual environment that has the wheel, and borrows its requirements from this one."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building and installing a wheel needs hatchling and pip")
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = place.glob("*.whl")
    environment = place / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # searched after the wheel's own
    return environment / "bin" / "prorl-hpc"


def ask(command: Path, *words: str, cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([command, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode in codes, done.stderr
    return done.stdout


def test_the_installed_command_works_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    assert "site_one_node" in ask(installed, "launch", "--help", cwd=tmp_path)
    assert "kind: slurm" in ask(installed, "launch", "--cfg", "job", "cluster=site_gpu", cwd=tmp_path)
    plan = ask(installed, "launch", "model=tiny", "cluster=site_service", "--dry-run", cwd=tmp_path, codes=(0, 2))
    # 2: there is an sbatch here, and no Slurm that answers it
    assert "node 2 (inference): inference-0" in plan and "#SBATCH hetjob" in plan
    assert "cluster=slurm" in ask(installed, "completion", "query", "launch", "cluster=s", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_it_is_the_wheel_that_was_asked(installed: Path, tmp_path: Path) -> None:
    program = "import prorl_hpc, prorl_hpc.config.store as s; print(prorl_hpc.__file__); print(s.conf_dir())"
    said = ask(installed.with_name("python"), "-c", program, cwd=tmp_path)
    assert all(line.startswith(str(installed.parents[1])) for line in said.splitlines()), said
