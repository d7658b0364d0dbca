"""Doctor on one node of a trial allocation: ``prorl-hpc doctor --node COMPONENT --meet DIRECTORY``, started by
`doctor --on-nodes`. What it finds goes into ``DIRECTORY/COMPONENT.json``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from prorl_hpc.cli import doctor_files, doctor_machine
from prorl_hpc.cli.doctor_meeting import Meeting
from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.config.run_directory import node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import load
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.own_container import image_of
from prorl_hpc.slurm.plan import host_of
from prorl_hpc.slurm.site import controller_answers


class NodeReport(msgspec.Struct, frozen=True):
    """``races_won``: of doctor_meeting.RACES."""

    name: str
    host: str
    python: str
    version: str
    races_won: int
    findings: list[Finding]


def examine_node(name: str, directory: Path) -> int:
    """Exit code 0 if the report was written, whatever it says."""
    if not (directory / "config.yaml").is_file():
        print(
            f"{directory} is not seen on {node_name()}: run.root must be on storage that all nodes share",
            file=sys.stderr,
        )
        return 1
    config = load(directory / "config.yaml")
    names = (directory / "names").read_text().split()
    meeting = Meeting(directory, name, names, config.cluster.interface)
    findings = [*meeting.findings(), *_local(config, name, directory)]
    won = meeting.races_won()
    python, version = ".".join(map(str, sys.version_info[:3])), metadata.version("prorl_hpc")
    write_json(directory / f"{name}.json", NodeReport(name, node_name(), python, version, won, findings))
    meeting.leave()
    return 0


def _local(config: ProrlConfig, name: str, directory: Path) -> Iterator[Finding]:
    """What the processes of component ``name``, and of those merged with it, need of their node."""
    merged = [c for c in ("rollout", "inference", "trainer") if host_of(config, c) == name]
    yield from doctor_machine.python()
    for component, check in (("inference", doctor_machine.engine), ("trainer", doctor_machine.trainer)):
        if component not in merged or (component == "trainer" and not config.trainer.enabled):
            continue
        if image := image_of(config.cluster, component):
            cure = f"set cluster.container.image (or cluster.{component}.container) to a path that this node sees"
            yield judged(component, f"runs in {image}", cure, good=Path(image).exists(), grade="fail")
        else:
            yield from check()
    yield from doctor_machine.gpus(getattr(config.cluster, name).gpus)
    if "rollout" in merged and config.sandbox.kind != "local":
        from prorl_hpc.cli.doctor_sandbox import examine_sandboxes

        yield from doctor_machine.sandbox()
        yield from doctor_machine.user_namespaces()
        yield from examine_sandboxes()
    yield from doctor_machine.cgroup()
    yield from doctor_machine.user_limits()
    yield from doctor_machine.memory()
    yield from doctor_files.room(str(directory))
    yield from doctor_files.runtime_root(config.run.runtime_root)
    yield from doctor_files.behaviour(directory)
    yield from doctor_files.network_places()
    silent = controller_answers()
    cure = "ask the admins: MUNGE and slurm.conf must work on the nodes, since the launcher starts its steps from there"
    yield judged("munge", silent or "the controller answers this node", cure, good=not silent, grade="fail")
