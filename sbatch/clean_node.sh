#!/bin/bash
# For admins, as Prolog or Epilog of all jobs (or from cron): removes what dead runs of prorl_hpc left on a node.
#
#   slurm.conf:  Epilog=/etc/slurm/epilog.d/*        and this file there, owned by root, executable
#   by hand:     sbatch/clean_node.sh [DIRECTORY…]   as root: of all users; else: of your own
#
# Edit: roots, the node-local directories that users set as run.runtime_root (not those below $SLURM_TMPDIR or a private
# /tmp: they go with the job).
#
# What it removes: DIRECTORY/prorl-<uid>-<hash> and /dev/shm/ of the same name, if
#   - it is a directory, not a link, of that very uid and closed to all others,
#   - its file `owner` says which run, job and process it is of, and that process's number counts here: the same boot and
#     PID namespace (or an earlier boot of this very machine),
#   - and nothing of these lives on this node: not that process, nor any other of the run or of the job.
# So it does not matter whose job begins or ends, and Slurm is not asked: an Epilog should not do that. Components of a
# heterogeneous job have ids of their own, while `owner` and SLURM_JOB_ID of all its processes name the first one's.
#
# /tmp belongs to everybody, so names in it are not trusted: root decides, and the directory's owner, whose rights
# setpriv (util-linux 2.24 or newer) takes on, reads and removes. Nothing is followed out of the directory.
# It always exits with 0, since another code of a Prolog or Epilog takes the node out of service, and within total_s.
set -u
total_s=60     # for all together,
directory_s=20 # and for one directory: a file system that hangs costs the others their turn, not the node
export LC_ALL=C
path=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
say() {
  echo "prorl clean_node: $*"
  logger -t prorl-clean-node -- "$*" 2>/dev/null
}

# This process must not look like one of the ending job.
[ "${PRORL_CLEAN_NODE:-}" ] || exec /usr/bin/env -i PRORL_CLEAN_NODE=begun PATH=$path /bin/bash "$0" "$@"
if [ "$PRORL_CLEAN_NODE" = begun ]; then
  PRORL_CLEAN_NODE=timed timeout --kill-after=2 "$total_s" /bin/bash "$0" "$@"
  case $? in 124 | 137) say "not done after $total_s s: what is left comes next time" ;; esac
  exit 0
fi
roots=("$@")
[ $# -gt 0 ] || roots=(/tmp)

as_owner() { # as_owner UID GID COMMAND…: with the rights of the directory's owner, until its time is over
  local uid=$1 gid=$2 left=$((until_s - SECONDS))
  shift 2
  [ "$left" -gt 0 ] || return
  # In the foreground: else the end of the total would not reach it.
  if [ "$(id -u)" = "$uid" ]; then
    timeout --foreground --kill-after=1 "$left" "$@"
  else
    timeout --foreground --kill-after=1 "$left" setpriv "--reuid=$uid" "--regid=$gid" --clear-groups "$@"
  fi
}

value() { # value KEY PATTERN TEXT: of the line KEY=…, if all of it fits the pattern
  sed -n "s/^$1=//p" <<<"$3" | head -n 1 | grep -xE "$2"
}

counts_here() { # counts_here TEXT: whether process numbers in `owner` are those of this /proc (see process_identity.py)
  local boot pidns here
  boot=$(value boot '[0-9a-f-]+' "$1") && pidns=$(value pidns '[0-9]+' "$1") || return
  [ "$(readlink /proc/self/ns/pid)" = "pid:[$pidns]" ] || return
  [ "$boot" = "$(</proc/sys/kernel/random/boot_id)" ] && return
  # Of an earlier boot, if it is of this machine: outside of containers, which share their names and ids.
  here=$(cat /etc/machine-id 2>/dev/null) && [ "$here" ] && [ "$pidns" = 4026531836 ] &&
    [ "$(value machine '.+' "$1")" = "$here" ] && [ "$(value host '.+' "$1")" = "$(uname -n)" ]
}

lives() { # lives UID PID STARTED RUN JOB BOOT: whether anything of the run or its job is alive on this node
  local stat fields
  if [ "$6" = "$(</proc/sys/kernel/random/boot_id)" ] && stat=$(cat "/proc/$2/stat" 2>/dev/null); then
    read -ra fields <<<"${stat##*) }" # of that name's end on: state, …, and as the 20th its start
    [ "${fields[19]}" = "$3" ] && [[ ${fields[0]} != [ZX] ]] && return 0
  fi
  # Of that user alone: scripts of the site that begin and end jobs bear the job's id too.
  find /proc -mindepth 1 -maxdepth 1 -name '[0-9]*' -uid "$1" -printf '%p/environ\0' 2>/dev/null |
    xargs -0 -r grep -lzxF -e "PRORL_RUN_ID=$4" ${5:+-e "SLURM_JOB_ID=$5"} 2>/dev/null | grep -q .
}

ours() { # ours PLACE UID: whether it is a directory, not a link, of that uid alone
  [ "$(find "$1" -maxdepth 0 -type d -uid "$2" ! -perm /077 2>/dev/null)" ]
}

remove() { # remove PLACE UID GID
  local mount
  # Containers mount over FUSE; what was not given back in order would keep the directory.
  while read -r mount; do
    [[ $mount == "$1"/* ]] && as_owner "$2" "$3" fusermount -uz "$mount"
  done < <(sed 's/^\([^ ]* \)\{4\}\([^ ]*\).*/\2/' /proc/self/mountinfo | sort -r)
  # Agents leave directories that nobody may enter.
  as_owner "$2" "$3" find "$1" -xdev -type d ! -perm -700 -exec chmod u+rwx {} \;
  as_owner "$2" "$3" rm -rf --one-file-system -- "$1"
} 2>&1

clean() { # clean DIRECTORY
  local directory=$1 name=${1##*/} uid gid text pid started run job place trouble
  uid=${name#prorl-} uid=${uid%%-*}
  [ "$(id -u)" = 0 ] || [ "$(id -u)" = "$uid" ] || return
  ours "$directory" "$uid" || return
  # The user's own group: that of the directory may be any that its user could give it, a system's one too (setgid).
  gid=$(id -g -- "$uid") || return
  until_s=$((SECONDS + directory_s))
  text=$(as_owner "$uid" "$gid" find "$directory" -maxdepth 1 -name owner -type f -size -8 -exec head -c 4096 {} \; 2>/dev/null | tr -d '\0')
  pid=$(value pid '[0-9]+' "$text") && run=$(value run '[A-Za-z0-9._-]+' "$text") || return
  started=$(value started '[1-9][0-9]*' "$text") && counts_here "$text" || return
  job=$(value job '[0-9]+' "$text")
  lives "$uid" "$pid" "$started" "$run" "$job" "$(value boot '.+' "$text")" && return
  for place in "$directory" "/dev/shm/$name"; do
    ours "$place" "$uid" || continue
    if trouble=$(remove "$place" "$uid" "$gid"); then
      say "removed $place of run $run${job:+, job $job}"
    else
      say "could not remove all of $place of run $run: ${trouble##*$'\n'}"
    fi
  done
}

for root in "${roots[@]}"; do
  for directory in "$root"/prorl-*-*; do
    [[ ${directory##*/} =~ ^prorl-[0-9]+-[0-9a-f]+$ ]] && clean "$directory"
  done
done
exit 0
