"""``prorl-hpc dev cluster VERB DIR``: a real Slurm cluster on this machine, to try a site's settings and to test with.

Exit code: 0 on success, 1 if it cannot be done here, 2 on wrong input; of ``run``, the command's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_hpc.messages.errors import ConfigError

if TYPE_CHECKING:
    from prorl_hpc.slurm.private.shape import Shape

_USAGE = """usage: prorl-hpc dev cluster VERB DIR [arguments]

Real Slurm on this machine, of your own: daemons, queue and nodes lie in DIR; needs the packages slurmctld, slurmd,
slurm-client and munge.

  start DIR            bring a cluster up (about a second); `start --help` says its sizes
  run DIR -- COMMAND   run COMMAND on the login node, or with --node NODE elsewhere
  crash DIR NODE       power the node off; `boot` switches it on again
  cut DIR NODE         pull its network cable; `heal` puts it back
  kill-slurmd DIR NODE kill its slurmd alone; `start-slurmd` starts it again
  stop DIR             end everything

Nodes are cpu01, cpu02, …, gpu01, …; partitions are cpu, gpu, and urgent, which preempts both."""
_NODE_VERBS = ("crash", "boot", "cut", "heal")
"""For namespaced clusters alone."""
_SLURMD_VERBS = ("kill-slurmd", "start-slurmd")


def main(argv: list[str]) -> int:
    if argv[:1] in ([], ["-h"], ["--help"]) or (argv[1:2] in ([], ["-h"], ["--help"]) and argv[0] == "cluster"):
        print(_USAGE)
        return 0 if set(argv) & {"-h", "--help"} else 2
    if argv[0] != "cluster":
        raise ConfigError(f"there is no {argv[0]}: there is cluster, as in `prorl-hpc dev cluster start DIR`")
    args = _parser().parse_args(argv[1:])
    try:
        return _start(args) if args.verb == "start" else _act(args)
    except (RuntimeError, TimeoutError) as error:
        print(f"prorl-hpc dev cluster {args.verb}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prorl-hpc dev cluster", usage=_USAGE.removeprefix("usage: "))
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start", help="bring a cluster up")
    start.add_argument("dir", type=Path)
    start.add_argument(
        "--kind",
        choices=("mini", "namespaced"),
        default="mini",
        help="mini: all nodes are this host; namespaced: each has its own network, /tmp and processes (needs root)",
    )
    start.add_argument("--cpu-nodes", type=int, default=4)
    start.add_argument("--gpu-nodes", type=int, default=2)
    start.add_argument("--cpus", type=int, default=8, help="that each node claims to have")
    start.add_argument("--memory-mib", type=int, default=16000, help="that each node claims to have")
    start.add_argument("--gpus", type=int, default=2, help="that each GPU node claims to have")
    start.add_argument("--kill-wait", type=int, default=10, metavar="S", help="Slurm's KillWait")
    start.add_argument("--max-minutes", type=int, default=120, help="the partitions' time limit")
    start.add_argument(
        "--share", type=Path, action="append", default=[], metavar="PATH", help="a directory that all nodes see"
    )
    start.add_argument(
        "--share-tmpfs",
        action="append",
        default=[],
        metavar="PATH:SIZE",
        help="a file system of that size (64m) that the nodes share, to be filled; namespaced only",
    )
    start.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of slurm.conf, such as Epilog=/path"
    )
    start.add_argument("--until-eof", action="store_true", help="stop the cluster when standard input ends")
    verbs.add_parser("stop").add_argument("dir", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("dir", type=Path)
    run.add_argument("--node", default="login")
    run.add_argument("argv", nargs="+", metavar="COMMAND")
    for verb in (*_NODE_VERBS, *_SLURMD_VERBS):
        acting = verbs.add_parser(verb)
        acting.add_argument("dir", type=Path)
        acting.add_argument("node")
    return parser


def _shape(args: argparse.Namespace) -> Shape:
    from prorl_hpc.slurm.private.shape import Shape

    tmpfs = {}
    for words in args.share_tmpfs:
        path, _, size = words.rpartition(":")
        if not path or not size:
            raise ConfigError(f"--share-tmpfs {words}: expected PATH:SIZE, such as /tmp/full:64m")
        tmpfs[str(Path(path).absolute())] = size
    for words in args.set:
        if not all(words.partition("=")):
            raise ConfigError(f"--set {words}: expected KEY=VALUE, such as KillWait=30")
    return Shape(
        kind=args.kind,
        cpu_nodes=args.cpu_nodes,
        gpu_nodes=args.gpu_nodes,
        cpus=args.cpus,
        memory_mib=args.memory_mib,
        gpus=args.gpus,
        kill_wait_s=args.kill_wait,
        max_minutes=args.max_minutes,
        share=[str(path.absolute()) for path in args.share],
        share_tmpfs=tmpfs,
        settings=dict(words.split("=", 1) for words in args.set),
    )


def _start(args: argparse.Namespace) -> int:
    from prorl_hpc.slurm.private.base import missing
    from prorl_hpc.slurm.private.ending import processes_of
    from prorl_hpc.slurm.private.opening import hold_cluster, make_cluster, start_cluster

    shape = _shape(args)
    shape.check()
    if reason := missing(shape.kind):
        raise RuntimeError(f"cannot start a {shape.kind} cluster: {reason}")
    directory = args.dir.absolute()
    if running := processes_of(make_cluster(directory, shape).conf):
        raise RuntimeError(
            f"{directory} has a cluster already, which runs ({len(running)} processes): it stays as it is. `prorl-hpc dev "
            f"cluster stop {args.dir}` ends it; then start it with the settings you want"
        )
    if args.until_eof:
        return hold_cluster(directory, shape)
    start_cluster(directory, shape)
    return 0


def _act(args: argparse.Namespace) -> int:
    from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
    from prorl_hpc.slurm.private.opening import open_cluster

    cluster = open_cluster(args.dir.absolute())
    if args.verb == "run":
        if args.node != "login":
            cluster.shape.check_node(args.node)
        return subprocess.run(cluster.command(args.argv, args.node)).returncode
    if args.verb == "stop":
        cluster.stop()
        return 0
    if args.verb in _NODE_VERBS and not isinstance(cluster, NamespacedSlurm):
        raise ConfigError(f"{args.verb} needs a cluster of --kind namespaced: the nodes of this one are all this host")
    getattr(cluster, args.verb.replace("-", "_"))(args.node)
    return 0
