"""``prorl-hpc model prepare NAME | list | path NAME``: models made on this machine, without a hub."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.children import die_with_parent
from prorl_hpc.trainer.model_recipes import RECIPES, is_prepared, prepare


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc model", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare", help="make a model unless it is there").add_argument("name", choices=sorted(RECIPES))
    verbs.add_parser("path", help="print where a model lies").add_argument("name", choices=sorted(RECIPES))
    verbs.add_parser("list", help="the recipes, and which are made")
    args = parser.parse_args(argv)
    if args.verb == "list":
        for recipe in RECIPES.values():
            state = "ready" if is_prepared(recipe.name) else "not made"
            print(f"{recipe.name:<16} {state:<9} {recipe.summary}")
        return 0
    if args.verb == "path":
        print(prepared_model(args.name))
        return 0 if is_prepared(args.name) else 1
    print(prepare(args.name, lambda text: print(f"{args.name}: {text}", file=sys.stderr, flush=True)))
    return 0


def prepare_in_child(name: str) -> Path:
    """Make the model in a process of its own, so that this one never loads torch; its progress is shown."""
    if not is_prepared(name):
        print(f"preparing the model {name} (once)", flush=True)
        command = [sys.executable, "-m", "prorl_hpc", "model", "prepare", name]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if code != 0:
            raise ConfigError(
                f"the model {name} could not be prepared: `prorl-hpc model prepare {name}` failed ({code})"
            )
    return prepared_model(name)
