"""``prorl-hpc bench NAME``: measure the service on this machine, each figure against a goal.

Exit code 0 if all figures were taken and hold, 1 otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterable

import msgspec
from rich.console import Console

from prorl_hpc.bench.disk_errors import given_path
from prorl_hpc.bench.document import check_place, write_into
from prorl_hpc.bench.figures import Figure, Machine, Report
from prorl_hpc.messages.errors import ConfigError

BENCHES = {
    "tools": "shell, output and ipython of a sandbox, against the bare ones, tmux, SWE-ReX and jupyter_client",
    "sandbox": "how soon a sandbox is there, alone, from the warm pool and 50 at once, and that 1,000 leave nothing",
    "coordinator": "throughput, latency, coupled and decoupled pools, the simulator's size, memory",
    "inference": "prefix-cache hits, the path to vLLM, its agent's CPU time, aborts, token drift, logprob gap",
    "conformance": "losses, gradients and advantages of the trainer against numbers of verl and TRL",
    "trainer": "a training step against TRL's, new weights into a running engine, how little the trainer waits",
    "launch": "how soon the command line answers and a job works, 20 requeues in a row, 200 runs watched",
    "scaling": "rollouts/s against nodes, a run of its own for each size; ablations; a folder with report and plots",
    "report": "series or runs side by side, or the report of a series once more",
    "fit": "how long a real engine takes, from a run that recorded its requests, for scripted engines",
    "soak": "nothing lost and nothing delivered twice while workers and the coordinator are killed",
    "all": "every one of these, one after the other; --quick: in 15 minutes; --write: the page of benchmarks",
}
_OWN_WORDS = ("all", "scaling", "report", "fit")
"""Those with a command line of their own, in cli.bench_NAME."""
_SOAK_SETTINGS = {"rollouts": 50_000, "workers": 8, "coordinator_kills": 2, "seed": 0}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name = _known(argv[0], "bench", BENCHES)
    if name in _OWN_WORDS:
        code: int = importlib.import_module(f"prorl_hpc.cli.bench_{name}").main(argv[1:])
        return code
    if name == "soak":
        return _soak(argv[1:])
    return _parts(name, argv[1:])


def usage() -> str:
    benches = "\n".join(f"  {name:<12} {what}" for name, what in BENCHES.items())
    return (
        "usage: prorl-hpc bench NAME [arguments]\n\n"
        "Measures this machine, with real processes. Prints one table, with --json one object; exits with 0 if\n"
        "all could be measured and holds its goal, else with 1.\n\n"
        f"{benches}\n\n`prorl-hpc bench NAME --help` says more."
    )


def _parts(bench: str, argv: list[str]) -> int:
    """A bench that is made of parts."""
    module = importlib.import_module(f"prorl_hpc.bench.{bench}")
    parts: dict[str, str] = module.PARTS
    parser = _parser(bench, "parts:\n" + "\n".join(f"  {name:<12} {what}" for name, what in parts.items()))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, less time")
    parser.add_argument("--part", nargs="+", action="extend", metavar="NAME", help="only these parts")
    args = parser.parse_args(argv)
    chosen = [_known(name, f"part of bench {bench}", parts) for name in args.part or parts]
    return _report(bench, args, lambda say: module.measure(chosen, args.quick, say))


def _soak(argv: list[str]) -> int:
    from prorl_hpc.bench.soak import SoakPlan, figures, soak

    settings = "\n".join(f"  {name}={default}" for name, default in _SOAK_SETTINGS.items())
    parser = _parser("soak", f"settings and their defaults:\n{settings}")
    parser.add_argument("settings", nargs="*", metavar="name=value")
    args = parser.parse_intermixed_args(argv)
    given = {**_SOAK_SETTINGS, **_numbers(args.settings)}
    plan = SoakPlan(
        given["rollouts"], given["workers"], coordinator_kills=given["coordinator_kills"], seed=given["seed"]
    )
    return _report("soak", args, lambda say: figures(plan, soak(plan, say)))


def _parser(name: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"prorl-hpc bench {name}",
        description=BENCHES[name],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--write", type=given_path, metavar="FILE", help="also write the table into FILE (docs/benchmarks.md)"
    )
    return parser


def _report(name: str, args: argparse.Namespace, measure: Callable[[Callable[[str], None]], list[Figure]]) -> int:
    if args.write:
        check_place(args.write, name)
    machine, began = Machine.here(), time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {words}", file=sys.stderr, flush=True)

    # Told to end, it takes down what it started, as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    report = Report.of(machine, measure(say))
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        report.show(Console(highlight=False))  # as wide as the terminal or $COLUMNS, else 80
    if args.write:
        write_into(args.write, name, report)
    return 0 if report.all_hold else 1


def _numbers(settings: list[str]) -> dict[str, int]:
    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        least = 1 if name in ("rollouts", "workers") else 0
        _known(name, "setting of bench soak", _SOAK_SETTINGS)
        if not value.isdigit() or int(value) < least:
            raise ConfigError(f"{setting}: expected {name}= and a whole number, {least} or more")
        found[name] = int(value)
    return found


def _known(given: str, what: str, names: Iterable[str]) -> str:
    if given not in set(names):
        near = difflib.get_close_matches(given, list(names), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no {what} {given!r}. {hint}There are {', '.join(names)}")
    return given
