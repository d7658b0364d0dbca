#!/usr/bin/env bash
# All tests, in two processes side by side: those on clusters of fakes mostly wait for Slurm, and
# tasks and outside agents come after them. What they said comes last.
# `make test` calls this; for a part of the tests: `.venv/bin/python -m pytest tests/core` and the like.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

beside=(tests/dev_cluster tests/sbatch tests/slurm tests/outside_agents tests/tasks)
said=.setup/tests-beside.log
mkdir -p .setup

set -m # else the shell has what it starts beside it ignore Ctrl-C, which tests send
.venv/bin/python -m pytest "${beside[@]}" >"$said" 2>&1 &
other=$!
set +m
trap 'kill -INT "$other" 2>/dev/null; wait "$other"; exit 130' INT TERM

.venv/bin/python -m pytest "${beside[@]/#/--ignore=}"
code=$?
echo
echo "== the tests beside these: ${beside[*]}"
wait "$other" || code=$?
cat "$said"
exit "$code"
