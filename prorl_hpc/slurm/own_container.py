"""Our own processes in a container: the command that starts one under Apptainer, and what must hold for it.

What Apptainer (1.4) does to a child, rootless and as root alike: it stays between as the process's parent, in the same
process group; signals reach the process, and its exit code or signal comes back. The process has the same id inside and
outside (no PID namespace), but it is not the id of our child. Apptainer kills it when Apptainer dies; Apptainer itself
keeps or loses PR_SET_PDEATHSIG by chance (Go calls exec on any of its threads), and killed by it would leave the FUSE
process of a .sif behind. So the process watches its standard input instead (observe.process): when the supervisor is
gone, it ends its group.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prorl_hpc import __version__
from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.config.policies import models_of
from prorl_hpc.config.run_directory import RunDirectory, filled_in
from prorl_hpc.config.schema import ClusterConfig, ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.observe.process import LEASH, VERSION
from prorl_hpc.slurm.plan import ProcessPlan

BINARIES = ("apptainer", "singularity")
COMPONENT_OF = {"coordinator": "rollout", "worker": "rollout", "inference": "inference", "trainer": "trainer"}
"""Role → component."""
_GPU_FLAGS = {"nvidia0": "--nv", "nvidiactl": "--nv", "kfd": "--rocm"}
_HOSTS_OWN = ("LD_PRELOAD", "BASH_ENV", "ENV", "VIRTUAL_ENV", "MANPATH", "PKG_CONFIG_PATH")
"""Variables beside PYTHON… and CONDA… that name files of the node, which the image has not. Apptainer itself keeps PATH
and LD_LIBRARY_PATH to itself."""


class Command(NamedTuple):
    """``leashed``: the process must be given a pipe as its standard input, held open while it may live."""

    words: list[str]
    environ: dict[str, str]
    leashed: bool


def image_of(cluster: ClusterConfig, component: str) -> str:
    """The image in which the processes of ``component`` run; empty: on the node itself."""
    own: str = getattr(cluster, component).container
    return own or cluster.container.image


def wrap(
    command: list[str],
    process: ProcessPlan,
    config: ProrlConfig,
    run: RunDirectory,
    environ: Mapping[str, str],
    devices: Path = Path("/dev"),
) -> Command:
    """``command`` (``[python, "-m", module, …]``) of ``process``, as it is or in its component's container. Raises RunError
    if the container cannot be started here."""
    component = COMPONENT_OF[process.role]
    image = image_of(config.cluster, component)
    if not image:
        return Command(command, dict(environ), leashed=False)
    settings = config.cluster.container
    words = [find_binary(environ), "-q", "exec", *gpu_flags(component, settings.args, devices)]
    for path in paths_of(config, run, environ):
        words += ["--bind", path]
    words += [*settings.args, str(filled_in(image).absolute()), settings.python, *command[1:]]
    return Command(words, {**inside_environment(environ), LEASH: "stdin", VERSION: __version__}, leashed=True)


def find_binary(environ: Mapping[str, str]) -> str:
    """The container program on this PATH. Raises RunError when there is none."""
    for name in BINARIES:
        if found := shutil.which(name, path=environ.get("PATH")):
            return found
    raise RunError(
        "cluster.container needs apptainer or singularity, and neither is on PATH: load the site's module "
        "(cluster.modules or cluster.setup can do it), or leave cluster.container.image out"
    )


def gpu_flags(component: str, given: list[str], devices: Path = Path("/dev")) -> list[str]:
    """What brings the node's GPU driver into the container: for components with models, unless ``given`` says it."""
    if component == "rollout" or {"--nv", "--nvccli", "--rocm"} & set(given):
        return []
    return sorted({flag for device, flag in _GPU_FLAGS.items() if (devices / device).exists()})


def inside_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The node's environment without what names its own Python and libraries; GPUs, proxies and the user's settings stay.
    The user's own site-packages stay out, which lie in a home directory that the container shares."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _HOSTS_OWN and not name.startswith(("PYTHON", "CONDA", "_CE_", "BASH_FUNC_"))
    }
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1"}


def paths_of(config: ProrlConfig, run: RunDirectory, environ: Mapping[str, str]) -> list[str]:
    """What the processes read and write, to be bound where it lies; of these what is there. A path that leads over
    links is bound under both its names. Raises RunError for one that --bind would cut in pieces."""
    task, sandbox = config.task, config.sandbox
    wanted = [str(filled_in(config.run.runtime_root)), str(run.path), str(prorl_home())]
    models = [model.path for model in models_of(config).values()]
    wanted += [*models, task.train.path, task.heldout.path, sandbox.image, environ.get("TMPDIR", "")]
    named = [Path(path).absolute() for path in wanted if "/" in path and Path(path).exists()]
    found = dict.fromkeys(str(name) for path in named for name in (path, path.resolve()))
    found |= dict.fromkeys(link for model in models for link in _behind_links(model))
    if cut := [path for path in found if ":" in path or "," in path]:
        raise RunError(f"{cut[0]} cannot be bound into a container: it has ':' or ',' in it; move or rename it")
    return list(found)


def _behind_links(model: str) -> Iterable[str]:
    """Directories of a model's files that are elsewhere, as in a Hugging Face cache."""
    if not model or not Path(model).is_dir():
        return []
    links = [path for path in Path(model).iterdir() if path.is_symlink() and path.exists()]
    return sorted({str(path.resolve().parent) for path in links})
