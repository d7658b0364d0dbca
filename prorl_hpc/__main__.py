"""``python -m prorl_hpc VERB``: one line per verb, each in its own file of ``prorl_hpc.cli``.

Nothing is imported before it is needed, so ``--help`` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys

VERBS = {
    "launch": "train: compose the configuration, check it, start one job, show it",
    "serve": "the rollout service alone, for a trainer elsewhere",
    "resume": "go on with a run from its newest checkpoint",
    "status": "all your runs, or where one stands",
    "top": "one run live in the terminal",
    "logs": "what its processes said",
    "attach": "a shell on a node of a run",
    "stop": "end a run in order; it can be resumed",
    "cancel": "the same, by job id",
    "clean": "remove what dead runs left on this machine, or an ended run",
    "model": "make, list or find the models that need no hub",
    "image": "build, pull, convert, list and verify the images of sandboxes",
    "doctor": "what this machine has and lacks",
    "simulate": "the rollout service under a virtual clock: any size, any times, policies side by side",
    "bench": "measure the service on this machine against its goals",
    "completion": "tab completion for bash, zsh or fish",
    "dev": "a real Slurm cluster on this machine, to try settings and to test with",
}


def usage() -> str:
    verbs = "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items())
    return (
        "usage: prorl-hpc VERB [arguments]        (also: python -m prorl_hpc VERB …)\n\n"
        "Trains multi-turn LLM agents by reinforcement learning, on this machine or on a Slurm cluster.\n\n"
        f"{verbs}\n\n`prorl-hpc VERB --help` says more. First steps: `prorl-hpc launch experiment=quick`"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit code is 0 on success, 1 on failure, 2 on wrong input, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("--version", "version"):
        from importlib.metadata import version

        print(version("prorl_hpc"))
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"prorl-hpc: there is no verb {verb}; {hint}verbs: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return _run(verb, rest)


def _run(verb: str, rest: list[str]) -> int:
    from prorl_hpc.config.run_directory import RunDirectoryError
    from prorl_hpc.messages.errors import ConfigError, ProrlError

    try:
        code: int = importlib.import_module(f"prorl_hpc.cli.{verb}").main(rest)
        return code
    except (ConfigError, RunDirectoryError) as error:
        print(f"prorl-hpc {verb}: {error}", file=sys.stderr)
        return 2
    except ProrlError as error:
        print(f"prorl-hpc {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `logs | head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
