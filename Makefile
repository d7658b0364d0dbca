# `make demo` and `make test` work on a fresh machine: each installs what it needs first.
.PHONY: demo test check setup clean
PY := .venv/bin/python

demo:            ## set everything up and train the default run on this machine
	@scripts/setup.sh demo
	$(PY) -m prorl_hpc launch

test:            ## set everything up and run all checks and tests
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory check
	@scripts/test.sh

check:           ## format, lint, types, import rules
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup:           ## set everything up
	@scripts/setup.sh test
	@scripts/setup.sh demo

clean:           ## remove what setup and the tests left in the checkout (not runs/)
	rm -rf .venv .setup .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
