"""``prorl-hpc logs [RUN_DIR] [NAME] [-f] [-n LINES]``: what the processes of a run said."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from prorl_hpc.cli.run_choice import chosen_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.children import tail
from prorl_hpc.slurm.job import Job


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc logs", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="[RUN_DIR] [NAME]", help="default: runs/latest, all logs")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", "--lines", type=int, default=20, help="last lines of each log (20)")
    args = parser.parse_args(argv)
    run, names = _choose(args.what)
    files = {name: run.process_log(name) for name in names}
    for name, file in files.items():
        if len(files) > 1:
            print(f"==> {name} <==")
        for line in tail(file, args.lines):
            print(line)
    if args.follow:
        _follow(run, files)
    return 0


def _choose(what: list[str]) -> tuple[RunDirectory, list[str]]:
    """A directory is the run, anything else a log's name (or the start of one)."""
    directories = [word for word in what if (Path(word) / "config.yaml").is_file()]
    if len(directories) > 1 or len(what) - len(directories) > 1:
        raise ConfigError("give at most one run directory and one log name")
    run = chosen_run(directories[0] if directories else None)
    known = sorted(path.stem for path in run.logs.glob("*.log"))
    wanted = next((word for word in what if word not in directories), "")
    names = [wanted] if wanted in known else [name for name in known if name.startswith(wanted)]
    if not names and wanted:
        raise ConfigError(f"{wanted} is neither a run directory nor a log of {run.run_id}; logs: {', '.join(known)}")
    return run, names


def _follow(run: RunDirectory, files: dict[str, Path]) -> None:
    """Print new lines as they come, with the process's name when there are several."""
    places = {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}
    width = max(map(len, files), default=0)
    job = Job.open(run)
    while True:
        alive = job is not None and job.alive()  # asked before reading, so that the last lines are seen
        for name, file in files.items():
            if not file.exists():
                continue
            with file.open("rb") as log:
                log.seek(places[name])
                text = log.read()
            whole = text if not alive else text[: text.rfind(b"\n") + 1]
            places[name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                print(f"{name:<{width}} | {line}" if len(files) > 1 else line, flush=True)
        if not alive:
            return
        time.sleep(0.3)
