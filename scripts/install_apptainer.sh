#!/usr/bin/env bash
# Put a working `apptainer` on PATH: scripts/install_apptainer.sh [--force]
#
#   it is there and works (or singularity is)    nothing to do
#   this Debian or Ubuntu carries a package      apt installs it
#   Debian 12, amd64, which carries none         the package of a newer Debian, from this machine's own mirror and
#                                                checked with its keyring, made to run on Debian 12's glibc
#                                                (glibc_unpin.py), with Debian 12's own dependencies
#   anything else                                the last line says why; exit code 3
# The system's apt never gets to see the newer Debian. Needs root, or sudo without a password. --force installs again.
#   APPTAINER_SUITE=sid             which Debian to take the package from
#   APPTAINER_DEB=/path/kept.deb    keep the download there, and use it when it is there
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
suite=${APPTAINER_SUITE:-sid}
export DEBIAN_FRONTEND=noninteractive

give_up() {
  echo "install_apptainer: $*" >&2
  exit 3
}

works() { command -v "$1" >/dev/null && "$1" --version >/dev/null 2>&1 && "$1" buildcfg >/dev/null 2>&1; }

is_ours() { dpkg-query -W -f '${Version}' apptainer 2>/dev/null | grep -q '+unpin'; }

apt=(apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::Languages=none)

# --- routes -----------------------------------------------------------------------------------------------------

distribution_has_it() {
  local candidate
  candidate=$(apt-cache policy apptainer 2>/dev/null | sed -n 's/^ *Candidate: //p')
  # Our own package is known to apt as well, once it is installed.
  [ -n "$candidate" ] && [ "$candidate" != '(none)' ] && [[ $candidate != *+unpin* ]]
}

install_from_distribution() {
  "${apt[@]}" install -y --no-install-recommends apptainer >/dev/null ||
    give_up "apt could not install the distribution's own package apptainer"
}

# Prints the mirror that this machine's apt uses for Debian itself.
debian_mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    grep -v '^[[:space:]]*#' | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | tr -d ' '
}

download() { # download DIRECTORY: the package of the newer Debian, with a private apt state
  local work=$1 mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  mirror=$(debian_mirror) || true
  [ -n "$mirror" ] || give_up "apt has no Debian mirror configured on this machine"
  [ -s "$keyring" ] || give_up "the package debian-archive-keyring is not installed, so nothing could be checked"
  mkdir -p "$work"/{sources,preferences,lists/partial,cache/archives/partial}
  : >"$work/status"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$mirror" "$suite" "$keyring" \
    >"$work/sources/newer.sources"
  local private=("${apt[@]}" -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
    -o Dir::Etc::preferences=/dev/null -o "Dir::Etc::preferencesparts=$work/preferences"
    -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
    -o APT::Sandbox::User=root)
  "${private[@]}" update || give_up "the list of Debian $suite's packages could not be had from $mirror"
  (cd "$work" && "${private[@]}" download apptainer) || give_up "Debian $suite's apptainer could not be had from $mirror"
}

repack() { # repack DIRECTORY: apptainer_*.deb → local.deb, which runs here
  local work=$1
  dpkg-deb -R "$work"/apptainer_*.deb "$work/package"
  python3 "$here/glibc_unpin.py" "$work/package/usr" || give_up "Debian $suite's apptainer cannot run on this glibc"
  sed -i -E 's/^(Version: .*)$/\1+unpin1/; s/libc6 \(>= [^)]*\)/libc6 (>= 2.34)/; /^(Static-)?Built-Using:/d' \
    "$work/package/DEBIAN/control"
  (cd "$work/package" && find usr -type f -print0 | xargs -0 md5sum >DEBIAN/md5sums)
  dpkg-deb --root-owner-group -Zgzip -z1 -b "$work/package" "$work/local.deb" >/dev/null
}

install_from_newer_debian() {
  work=$(mktemp -d /tmp/apptainer-install.XXXXXX)
  trap 'rm -rf "$work"' EXIT
  chmod 755 "$work"
  if [ -n "${APPTAINER_DEB:-}" ] && [ -s "$APPTAINER_DEB" ]; then
    cp "$APPTAINER_DEB" "$work/apptainer_kept.deb"
  else
    download "$work"
    if [ -n "${APPTAINER_DEB:-}" ]; then cp "$work"/apptainer_*.deb "$APPTAINER_DEB"; fi
  fi
  repack "$work" || give_up "Debian $suite's apptainer could not be repacked"
  "${apt[@]}" install -y --no-install-recommends --allow-downgrades --reinstall "$work/local.deb" \
    squashfs-tools uidmap fuse3 squashfuse fuse-overlayfs >/dev/null ||
    give_up "apt could not install the repacked apptainer and what it depends on"
}

# --- what a package leaves to the machine ------------------------------------------------------------------------
# Containers and virtual machines without udev, and root with fewer capabilities than all, need this; elsewhere it
# finds nothing to do.
no_fakeroot() { echo "install_apptainer: root has no subordinate ids: builds with --fakeroot by root will fail" >&2; }

settle_machine() {
  if [ -c /dev/fuse ] && [ "$(stat -c %a /dev/fuse)" != 666 ]; then
    chmod 666 /dev/fuse || echo "install_apptainer: /dev/fuse stays closed to users: .sif images will not mount" >&2
  fi
  grep -qs "^root:" /etc/subuid || usermod --add-subuids 1000000-1065535 root || no_fakeroot
  grep -qs "^root:" /etc/subgid || usermod --add-subgids 1000000-1065535 root || no_fakeroot
  python3 - <<'PY'
import json
import re
from pathlib import Path

NAMES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
PERFMON BPF CHECKPOINT_RESTORE""".split()
mask = int(re.search(r"CapPrm:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
have = ["CAP_" + name for bit, name in enumerate(NAMES) if mask >> bit & 1]
capabilities, config = Path("/etc/apptainer/capability.json"), Path("/etc/apptainer/apptainer.conf")
if len(have) < len(NAMES):  # apptainer as root would ask for all of them and fail
    capabilities.write_text(json.dumps({"users": {"root": have}}, indent=1))
    old = config.read_text()
    new = re.sub(r"(?m)^root default capabilities = .*$", "root default capabilities = file", old)
    if new != old:
        config.write_text(new)
PY
}

# --- which route -------------------------------------------------------------------------------------------------

if [ "${1:-}" != --force ]; then
  for binary in apptainer singularity; do
    if works "$binary"; then
      if [ "$(id -u)" = 0 ] && is_ours; then settle_machine; fi
      "$binary" --version
      exit 0
    fi
  done
fi
if [ "$(id -u)" != 0 ]; then
  # sudo drops the environment: what steers us is passed by name
  sudo -n true 2>/dev/null || give_up "needs root, or sudo without a password"
  exec sudo -n env APPTAINER_SUITE="$suite" APPTAINER_DEB="${APPTAINER_DEB:-}" "${BASH_SOURCE[0]}" "$@"
fi
command -v apt-get >/dev/null || give_up "this is no Debian or Ubuntu (no apt-get): see apptainer.org for your system"
# shellcheck disable=SC1091  # it is the machine's
. /etc/os-release
"${apt[@]}" update || echo "install_apptainer: apt-get update failed; going on with the lists that are there" >&2
if distribution_has_it; then
  install_from_distribution
else
  [ "${ID:-} ${VERSION_ID:-}" = "debian 12" ] || give_up "${PRETTY_NAME:-this system} carries no package apptainer"
  [ "$(dpkg --print-architecture)" = amd64 ] || give_up "Debian 12 carries no apptainer, and this machine is not amd64"
  command -v python3 >/dev/null || give_up "python3 is not installed"
  install_from_newer_debian
  settle_machine
fi
works apptainer || give_up "apptainer was installed but does not run: try \`apptainer buildcfg\`"
apptainer --version
