"""``prorl-hpc doctor [--on-nodes] [--json] [OVERRIDE …]``: what this machine, its Slurm and its nodes have and lack, what
that means, and how to cure it. With overrides (cluster=slurm cluster.trainer.partition=gpu …) the plan that they make is
held against the site; ``--on-nodes`` looks at one node of each component, inside a small allocation."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prorl_hpc.cli import doctor_files, doctor_machine
from prorl_hpc.cli.findings import Finding, summary, worst
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError

_QUEUE_S = 600.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--on-nodes", action="store_true", help="look at one node of each component too")
    parser.add_argument(
        "--wait", type=float, default=_QUEUE_S, metavar="SECONDS", help="time in the queue (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON on standard output")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args(argv)
    if args.node:
        from prorl_hpc.cli.doctor_node import examine_node

        return examine_node(args.node, args.meet)
    config = _config(overrides, on_nodes=args.on_nodes)
    findings: list[Finding] = []
    for finding in _all(config, args.on_nodes, args.wait):
        if not args.json:
            _show(finding, findings[-1].where if findings else "")
        findings.append(finding)
    if args.json:
        print(json.dumps({"grade": worst(findings), "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        print(f"\n{summary(findings)}")
    return 1 if worst(findings) == "fail" else 0


def _config(overrides: list[str], *, on_nodes: bool) -> ProrlConfig:
    if not overrides and not on_nodes:
        return ProrlConfig()
    from prorl_hpc.cli.composition import compose_all

    composed = compose_all(overrides if overrides else ["cluster=slurm"])
    if len(composed) != 1:
        raise ConfigError("doctor looks at one configuration: leave --multirun and --cfg to `prorl-hpc launch`")
    config = composed[0].config
    if on_nodes and config.cluster.kind != "slurm":
        raise ConfigError(f"--on-nodes needs a Slurm plan, cluster.kind={config.cluster.kind}: add cluster=slurm")
    return config


def _all(config: ProrlConfig, on_nodes: bool, queue_s: float) -> Iterator[Finding]:
    refused = False
    for finding in examine(config):
        refused = refused or (finding.grade == "fail" and finding.subject in ("slurm", "plan"))
        yield finding
    if on_nodes and refused:
        yield Finding("fail", "allocation", "not asked for: Slurm or the plan stands in the way", "see the lines above")
    elif on_nodes:
        from prorl_hpc.cli.doctor_allocation import examine_nodes

        yield from examine_nodes(config, queue_s, lambda words: print(f"      {words}", file=sys.stderr, flush=True))


def _show(finding: Finding, place_before: str) -> None:
    if finding.where != place_before:
        print(f"\n{finding.where or 'between the nodes'}")
    print(f"{finding.grade:<5} {finding.subject:<18} {finding.found}", flush=True)
    if finding.cure:
        print(f"{'':<5} {'':<18} → {finding.cure}", flush=True)


def examine(config: ProrlConfig | None = None) -> Iterator[Finding]:
    """Every check of this machine, in the order in which a run would meet it."""
    config = config or ProrlConfig()
    local = config.cluster.kind == "local"
    checks: list[Callable[[], Iterator[Finding]]] = [doctor_machine.python]
    if local:  # on Slurm, engine and trainer run elsewhere
        checks += [doctor_machine.engine, doctor_machine.trainer]
    checks += [doctor_machine.gpus, lambda: _slurm(config), doctor_machine.sandbox, doctor_machine.user_namespaces]
    if local:
        checks += [_sandboxes]
    checks += [
        doctor_machine.cgroup,
        doctor_machine.user_limits,
        lambda: doctor_files.room(config.run.root),
        lambda: doctor_files.runtime_root(config.run.runtime_root) if local else iter(()),
        lambda: doctor_files.behaviour(Path(config.run.root)),
        doctor_files.network_places,
        doctor_machine.memory,
    ]
    for check in checks:
        yield from check()


def _sandboxes() -> Iterator[Finding]:
    from prorl_hpc.cli.doctor_sandbox import examine_sandboxes

    yield from examine_sandboxes()


def _slurm(config: ProrlConfig) -> Iterator[Finding]:
    from prorl_hpc.cli.doctor_slurm import examine_site
    from prorl_hpc.slurm.site import ask_site, slurm_is_here

    if not slurm_is_here():
        asked = config.cluster.kind == "slurm"
        found = "no sbatch here: runs go to this machine (cluster=slurm needs a login node)"
        cure = "run this on a login node of the cluster, or load its Slurm module" if asked else ""
        yield Finding("fail" if asked else "ok", "slurm", found, cure)
        return
    yield from examine_site(ask_site(), config)
