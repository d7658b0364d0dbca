#!/usr/bin/env bash
# All tests, in two processes side by side: those on clusters of fakes mostly wait for Slurm, and
# whole runs, outside agents, tasks, trainer and examples come after them. What they said comes last.
# Two processes with clusters and engines on a small machine starve one another now and then; so the few tests that failed
# in company run again, alone, and the last lines name them. Only what fails alone too fails the whole.
# `make test` calls this; for a part of the tests: `.venv/bin/python -m pytest tests/core` and the like.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

beside=(tests/dev_cluster tests/sbatch tests/slurm tests/main_job tests/outside_agents tests/tasks tests/trainer tests/examples)
said=.setup/tests-beside.log
few=8 # more than these is no accident
rm -rf .setup/pytest-main .setup/pytest-beside
mkdir -p .setup

set -m # else the shell has what it starts beside it ignore Ctrl-C, which tests send
.venv/bin/python -m pytest -o cache_dir=.setup/pytest-beside "${beside[@]}" >"$said" 2>&1 &
other=$!
set +m
trap 'kill -INT "$other" 2>/dev/null; wait "$other"; exit 130' INT TERM

.venv/bin/python -m pytest -o cache_dir=.setup/pytest-main "${beside[@]/#/--ignore=}"
main_code=$?
echo
echo "== the tests beside these: ${beside[*]}"
wait "$other"
beside_code=$?
cat "$said"

# again NAME CODE: 0 where the tests of this process passed, or those that failed pass alone
again() {
  (($2 == 1)) || return "$2" # 1: tests failed; anything else is no test's failure
  local failed=.setup/pytest-$1/v/cache/lastfailed
  .venv/bin/python - "$failed" "$few" <<'PYTHON' || return 1
import json, sys
failed = list(json.load(open(sys.argv[1])))
print(f"\n== failed in company: {len(failed)}", *failed, sep="\n   ", flush=True)
sys.exit(len(failed) > int(sys.argv[2]))
PYTHON
  echo "== these again, alone"
  .venv/bin/python -m pytest -o "cache_dir=.setup/pytest-$1" --last-failed --last-failed-no-failures none || return 1
  echo "== passed alone, failed in company: see above which"
}

code=0
again main "$main_code" || code=1
again beside "$beside_code" || code=1
exit "$code"
