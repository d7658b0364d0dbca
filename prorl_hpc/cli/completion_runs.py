"""What may follow a verb that is about a run: its flags, runs, and what that run has: logs, nodes, processes, attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

FLAGS = {
    "resume": ("--fresh", "--detach"),
    "status": ("--json", "--limit", "--all", "--watch"),
    "logs": ("--follow", "--component", "--attempt", "--lines"),
    "stop": ("--now", "--drain"),
    "cancel": ("--root", "--now"),
    "top": ("--every",),
    "attach": ("--command",),
    "clean": ("--yes", "--dry-run", "--root"),
}
"""Of each such verb, besides --help."""
_WITH_VALUE = ("--limit", "--watch", "--attempt", "--lines", "-n", "--drain", "--root", "--every", "--command")
_COMPONENT = ("--component", "-c")


def run_words(verb: str, words: list[str], overrides: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """``words``: those after the verb, the last of them half typed. ``overrides``: settings that begin so."""
    typed, before = words[-1], words[-2] if len(words) > 1 else ""
    run = _named_run(words[:-1])
    if verb == "logs" and before in _COMPONENT:
        yield from _logs_of(run)
    elif verb == "logs" and before == "--attempt":
        yield from _attempts_of(run)
    elif before in _WITH_VALUE or (verb == "attach" and before == "-c"):
        return
    elif typed.startswith("-"):
        yield from (*FLAGS[verb], "--help")
    elif verb == "attach" and run is not None:
        yield from _places_of(run)
    else:
        yield from _all_runs() if run is None else ()
        if verb == "resume" and ("." in typed or "=" in typed or run is not None):
            yield from overrides(typed)


def _named_run(words: list[str]) -> str | None:
    """The first word that is no flag, nor the value of one, nor an override."""
    before = ""
    for word in words:
        if not word.startswith("-") and before not in (*_WITH_VALUE, *_COMPONENT) and "=" not in word:
            return word
        before = word
    return None


def _all_runs() -> Iterator[str]:
    from prorl_hpc.cli.run_choice import known_runs

    yield "latest"
    yield from (run.run_id for run in known_runs())


def _logs_of(given: str | None) -> Iterator[str]:
    from prorl_hpc.cli.log_names import ROLES, log_files
    from prorl_hpc.cli.run_choice import chosen_run
    from prorl_hpc.config.run_directory import RunDirectory

    run = chosen_run(given, to_read=True)
    yield from log_files(RunDirectory(run.path, run.newest_attempt))
    yield from ROLES


def _attempts_of(given: str | None) -> Iterator[str]:
    from prorl_hpc.cli.run_choice import chosen_run

    yield from (str(attempt.attempt) for attempt in chosen_run(given, to_read=True).all_attempts())


def _places_of(given: str) -> Iterator[str]:
    """Hosts and processes, and which of the plan's components there are."""
    from prorl_hpc.cli.run_choice import chosen_run
    from prorl_hpc.config.run_directory import RunDirectory
    from prorl_hpc.messages.codec import read_json
    from prorl_hpc.slurm.attaching import placed_nodes
    from prorl_hpc.slurm.plan import Plan

    run = chosen_run(given)
    for node in placed_nodes(RunDirectory(run.path, run.newest_attempt)):
        yield from (node.host, node.component)
    plan = read_json(run.plan_file, Plan)
    yield from (process.name for process in plan.processes) if plan is not None else ()
