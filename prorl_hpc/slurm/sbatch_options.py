"""Options of sbatch and srun that settings may add (``cluster.extra``, ``cluster.sbatch_lines``, ``cluster.srun_args``), and
those that are decided elsewhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

_OF_RUN, _ONE_TASK, _ONE_JOB = "the run directory's jobs/", "one task per node", "one job per run"
OWNED_OPTIONS = {
    "job-name": "run.name",
    "output": _OF_RUN,
    "error": _OF_RUN,
    "open-mode": _OF_RUN,
    "nodes": "cluster.<component>.nodes",
    "ntasks": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "array": _ONE_JOB,
    "wrap": _ONE_JOB,
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "no-kill": "cluster.no_kill",
    "signal": "cluster.signal_lead_s",
    "time": "cluster.time_minutes",
}
"""sbatch options that the plan decides, and what to set instead."""

_NOT_OURS = {
    "clusters": "a run is looked for on the cluster that it was started on: launch it on a login node of the other one",
    "wait": "`prorl-hpc launch` waits by itself, and shows the run meanwhile",
    "parsable": "the job's number is read from sbatch's usual words",
    "quiet": "the job's number is read from sbatch's usual words",
}
"""sbatch options that a run cannot have, and why."""

_SBATCH_NAMES = """account acctg-freq batch bb bbf begin chdir cluster-constraint comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution exclude exclusive export export-file extra extra-node-info get-user-env
gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs
input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nice nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket
oom-kill-step overcommit oversubscribe partition power prefer priority profile propagate qos reboot
reservation resv-ports segment sockets-per-node spread-job stepmgr switches thread-spec
threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes wait-all-nodes
wckey"""
SBATCH_OPTIONS = frozenset(_SBATCH_NAMES.split())
"""Long names that sbatch knows (Slurm 22.05 to 25.05), without those in OWNED_OPTIONS."""

_ALONE = """contiguous exclusive get-user-env hold ignore-pbs nice oom-kill-step overcommit oversubscribe propagate
reboot resv-ports spread-job stepmgr use-min-nodes"""
_WITHOUT_VALUE = frozenset(_ALONE.split())
"""Those that may stand alone. Any other would take the option on the next line of the script as its value."""

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_BLANKS = " \t\r\n\v\f"
_SHORT_FLAGS = {"H": "hold", "k": "no-kill", "O": "overcommit", "Q": "quiet", "s": "oversubscribe", "W": "wait"}

_SRUN_OWNED = {
    "job-name": "run.name",
    "nodes": "cluster.<component>.nodes",
    "ntasks": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "nodelist": "cluster.<component>.nodelist",
    "het-group": "cluster.<component>.nodes",
    "cpus-per-task": "cluster.<component>.cpus",
    "cpu-bind": "cluster.<component>.cpu_bind",
    "no-kill": "cluster.no_kill",
    "output": "the run directory's logs/",
    "error": "the run directory's logs/",
    "multi-prog": _ONE_TASK,
    "pty": "`prorl-hpc attach`",
}


def check_extra(where: str, extra: dict[str, str], site_options: Iterable[str] = ()) -> list[str]:
    """What is wrong with ``cluster.extra`` or a component's; ``site_options`` are those that only this
    site's sbatch knows (SPANK plugins)."""
    known = SBATCH_OPTIONS | set(site_options)
    errors = []
    for key, value in extra.items():
        if key in OWNED_OPTIONS:
            errors.append(f"{where}.{key}: {_decided('sbatch', key, OWNED_OPTIONS)}")
        elif key in _NOT_OURS:
            errors.append(f"{where}.{key}: sbatch's --{key} must be left out: {_NOT_OURS[key]}")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"valid names: {', '.join(sorted(known))}"
            errors.append(f"{where}.{key}: sbatch has no option --{key}; {hint}")
        elif not value and key in SBATCH_OPTIONS - _WITHOUT_VALUE:
            errors.append(f"{where}.{key} is empty: sbatch's --{key} needs a value: give one, or leave it out")
    return errors


def check_sbatch_lines(lines: Iterable[str]) -> Iterator[str]:
    """What is wrong with ``cluster.sbatch_lines``, whose options are read as sbatch does."""
    for line in lines:
        where = f"cluster.sbatch_lines: {line!r}"
        if re.match(r"#(PBS|BSUB)", line):
            yield f"{where}: sbatch reads such lines too: write what is meant as an #SBATCH line"
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = sbatch_words(line)
        except ValueError as error:
            yield f"{where}: {error}"
            continue
        for name in dict.fromkeys(_option_names(words)):
            if name in OWNED_OPTIONS:
                yield f"{where}: {_decided('sbatch', name, OWNED_OPTIONS)}"
            elif name in _NOT_OURS:
                yield f"{where}: sbatch's --{name} must be left out: {_NOT_OURS[name]}"
        yield from (f"{where}: {problem}" for problem in _stray(words))


def check_srun_args(words: Iterable[str]) -> Iterator[str]:
    """What is wrong with ``cluster.srun_args``. Each is an option with its value: srun would take a word of its own as
    the command to run."""
    for word in words:
        where = f"cluster.srun_args: {word!r}"
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?|-[A-Za-z]\S*", word):
            yield f"{where} must be one option of srun with its value behind =, such as --export=ALL; a second one is an entry of its own"
            continue
        for name in dict.fromkeys(_option_names([word])):
            if name in _SRUN_OWNED:
                yield f"{where}: {_decided('srun', name, _SRUN_OWNED)}"


def _decided(program: str, name: str, owners: dict[str, str]) -> str:
    return f"{program}'s --{name} is decided by the plan: use {owners[name]}"


def sbatch_words(line: str) -> list[str]:
    """The words of an #SBATCH line as sbatch takes them apart: nearly as a shell, but a backslash counts within single
    quotes too, and # ends the line anywhere outside quotes. Raises ValueError for what sbatch refuses."""
    words: list[str] = []
    word, quote, begun, escaped = "", "", False, False
    for sign in line.removeprefix("#SBATCH"):
        if escaped and (quote or sign not in _BLANKS):
            word, escaped = word + sign, False
        elif sign == "\\":
            begun = escaped = True
        elif sign == quote:
            quote = ""
        elif quote:
            word += sign
        elif sign in "'\"":
            quote, begun = sign, True
        elif sign == "#":
            break
        elif sign in _BLANKS:
            words += [word] * begun
            word, begun, escaped = "", False, False
        else:
            word, begun = word + sign, True
    if quote or escaped:
        raise ValueError(
            f"sbatch misses the closing {quote}" if quote else "a backslash at its end hides the next line"
        )
    return words + [word] * begun


def _option_names(words: list[str]) -> Iterator[str]:
    """The long names of all options among ``words``; a long one may be shortened, and short flags written together."""
    for word in words:
        if word.startswith("--"):
            yield _full_name(word[2:].partition("=")[0])
        elif word.startswith("-"):
            yield from _short_names(word[1:])


def _full_name(name: str) -> str:
    """getopt takes a long option by any beginning of its name that fits no other."""
    ours = [*OWNED_OPTIONS, *_NOT_OURS, *_SRUN_OWNED]
    if not name or name in ours or name in SBATCH_OPTIONS:
        return name
    owned = [other for other in ours if other.startswith(name)]
    return owned[0] if owned else name


def _short_names(letters: str) -> Iterator[str]:
    for letter in letters:
        if letter in _SHORT:  # the rest is its value
            yield _SHORT[letter]
            return
        yield _SHORT_FLAGS.get(letter, letter)


def _stray(words: list[str]) -> Iterator[str]:
    """Options that would take the next line's option as their value, and words that belong to none."""
    waiting = ""
    for word in words:
        if waiting:
            waiting = ""
        elif word.startswith("--"):
            name, equals, _ = word[2:].partition("=")
            waiting = name if name in SBATCH_OPTIONS - _WITHOUT_VALUE and not equals else ""
        elif word.startswith("-"):
            waiting = word[1] if len(word) == 2 and word[1] in _SHORT else ""
        elif word not in ("hetjob", "packjob"):
            yield f"sbatch cannot read {word!r}, which belongs to no option: put a value of several words into quotes"
    if waiting:
        yield f"sbatch's {'-' * min(2, len(waiting))}{waiting} needs a value, or it takes the next line's option as one"
