"""``prorl-hpc completion bash|zsh|fish``: prints what makes the shell complete verbs, groups, settings and runs.

The scripts ask ``prorl-hpc completion query WORD …`` for the last word's candidates. Hydra has a completion of its own,
which knows no verbs and composes the configuration at every key press, in about a second; this reads names alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prorl_hpc.cli.completion_runs import FLAGS, run_words

_SHELLS = {
    "bash": r"""# put into ~/.bashrc:  eval "$(prorl-hpc completion bash)"
_prorl_hpc() {
    local line=${COMP_LINE:0:COMP_POINT} typed before="" candidate
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    typed=${words[-1]}
    # readline completes what comes after the last = alone
    [[ $COMP_WORDBREAKS == *=* && $typed == *=* ]] && before=${typed%"${typed##*=}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$before"}")
        [[ $candidate == *[=.,] ]] && compopt -o nospace
    done < <("${words[0]}" completion query "${words[@]:1}" 2>/dev/null)
}
complete -o default -F _prorl_hpc prorl-hpc
""",
    "zsh": r"""# put into ~/.zshrc:  eval "$(prorl-hpc completion zsh)"
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_prorl_hpc() {
    local -a candidates
    candidates=(${(f)"$("${words[1]}" completion query "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)"})
    if (( $#candidates )); then
        compadd -S '' -- ${(M)candidates:#*[=.,]}
        compadd -- ${candidates:#*[=.,]}
    else
        compset -P '*='
        _files
    fi
}
compdef _prorl_hpc prorl-hpc
""",
    "fish": r"""# put into ~/.config/fish/config.fish:  prorl-hpc completion fish | source
function __prorl_hpc_candidates
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    $words[1] completion query $words[2..-1] "$typed" 2>/dev/null
end
complete -c prorl-hpc -a '(__prorl_hpc_candidates)'
""",
}
_HELP = """usage: prorl-hpc completion bash|zsh|fish

Prints what makes the shell complete verbs, groups and their choices, settings, and runs:
  bash  eval "$(prorl-hpc completion bash)"      in ~/.bashrc
  zsh   eval "$(prorl-hpc completion zsh)"       in ~/.zshrc
  fish  prorl-hpc completion fish | source       in ~/.config/fish/config.fish"""
_ACTIONS = {
    "completion": tuple(_SHELLS),
    "model": ("prepare", "list", "path"),
    "image": ("build", "pull", "list", "verify", "convert", "remove"),
    "bench": (
        *("tools", "sandbox", "coordinator", "inference", "conformance", "trainer", "launch", "scaling"),
        *("report", "fit", "soak", "all"),
    ),
    "dev": ("cluster",),
}
_CLUSTER_ACTIONS = ("start", "run", "crash", "boot", "cut", "heal", "kill-slurmd", "start-slurmd", "stop")
_SIGNS = ("++", "+", "~")


def main(argv: list[str]) -> int:
    """2 for a shell that is not known."""
    if argv[:1] == ["query"]:
        print("\n".join(candidates(argv[1:])))
        return 0
    if len(argv) == 1 and argv[0] in _SHELLS:
        print(_SHELLS[argv[0]], end="")
        return 0
    asked = argv in (["--help"], ["-h"])
    print(_HELP, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def candidates(words: list[str]) -> list[str]:
    """What the last of ``words`` (those after the program's name) may become."""
    typed = words[-1] if words else ""
    if len(words) <= 1:
        from prorl_hpc.__main__ import VERBS

        found: Iterator[str] = iter([*VERBS, "--help", "--version"])
    elif words[0] in ("launch", "serve"):
        found = _launch_words(typed, words[-2])
    elif words[0] in FLAGS:
        found = _of_run(words)
    elif words[0] == "doctor":
        found = iter(("--json", "--on-nodes", "--wait", "--help") if typed.startswith("-") else _overrides(typed))
    elif words[:2] == ["bench", "scaling"] and len(words) > 2:
        found = _scaling_words(typed)
    elif words[:2] == ["dev", "cluster"]:
        found = iter(_CLUSTER_ACTIONS if len(words) == 3 else ())
    else:
        found = iter(_ACTIONS.get(words[0], ()) if len(words) == 2 else ())
    return sorted({word for word in found if word.startswith(typed)})


def _scaling_words(typed: str) -> Iterator[str]:
    from prorl_hpc.bench.scaling_settings import FLAGS as SCALING_FLAGS
    from prorl_hpc.bench.scaling_settings import SETTINGS
    from prorl_hpc.cli.launch_help import group_choices

    name, equals, _ = typed.partition("=")
    if typed.startswith("-"):
        yield from SCALING_FLAGS
    elif name == "workload" and equals:
        yield from (f"workload={choice}" for choice in group_choices()["bench"])
    elif not (name in SETTINGS and equals):
        yield from (f"{name}=" for name in SETTINGS)
        yield from (word for word in _overrides(typed) if not word.startswith("bench="))


def _of_run(words: list[str]) -> Iterator[str]:
    """Nothing where the run that is named is none, or has nothing yet: a key press is no place for errors."""
    from prorl_hpc.config.run_directory import RunDirectoryError
    from prorl_hpc.messages.errors import ProrlError

    try:
        return iter(list(run_words(words[0], words[1:], _overrides)))
    except (ProrlError, RunDirectoryError, OSError):
        return iter(())


def _launch_words(typed: str, before: str) -> Iterator[str]:
    if before in ("--cfg", "-c"):
        yield from ("job", "hydra", "all")
    elif before in ("--config-dir", "-cd", "--config-name", "-cn", "--package", "-p"):
        return
    elif typed.startswith("-"):
        yield from (
            "--dry-run",
            "--detach",
            "--help",
            "--multirun",
            "--cfg",
            "--config-dir",
            "--hydra-help",
            "--resolve",
        )
    else:
        sign = next((sign for sign in _SIGNS if typed.startswith(sign)), "")
        yield from (sign + word for word in _overrides(typed.removeprefix(sign)))


def _overrides(typed: str) -> Iterator[str]:
    """``cluster=slurm``; settings one dot at a time; values where only some are allowed."""
    from prorl_hpc.cli.launch_help import group_choices

    groups = group_choices()
    name, equals, value = typed.partition("=")
    if equals:
        done = value.rpartition(",")[0] + "," if "," in value else ""  # of a sweep
        allowed = list(groups[name]) if name in groups else _values(name)
        yield from (f"{name}={done}{choice}" for choice in allowed)
        return
    yield from (f"{group}=" for group in groups)
    yield from _settings(typed)


def _settings(typed: str) -> Iterator[str]:
    from dataclasses import fields, is_dataclass

    from prorl_hpc.config.schema import ProrlConfig

    parents = typed.split(".")[:-1]
    value: object = ProrlConfig()
    for part in parents:
        value = getattr(value, part, None)
    if not is_dataclass(value):
        return
    for field in fields(value):
        name = ".".join([*parents, field.name])
        yield f"{name}." if is_dataclass(getattr(value, field.name)) else f"{name}="


def _values(name: str) -> list[str]:
    from prorl_hpc.config.schema import ProrlConfig
    from prorl_hpc.config.validation import allowed_words, setting

    try:
        plain = setting(ProrlConfig(), name)
    except AttributeError:
        return []
    return ["true", "false"] if isinstance(plain, bool) else allowed_words(name)
