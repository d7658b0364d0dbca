#!/bin/bash
# PID 1 of one namespaced machine of the private cluster: node_init.sh DIR NAME IP TMPFS_SIZE [SHARED_DIR...]
# It runs in its own network, mount, PID, IPC and UTS namespaces; /tmp, /var/tmp, /run and /dev/shm become private,
# the shared directories are bound back in at the same paths.
set -eu
dir=$1 name=$2 ip=$3 size=$4
shift 4
read -r host_pid _ </proc/self/stat # /proc is still the host's here
mount --make-rprivate /
hostname "$name"

shared=("$dir" "$@") held=()
for path in "${shared[@]}"; do # held open, since the mounts below hide them
  exec {fd}<"$path"
  held+=("$fd")
done
for path in /tmp /var/tmp /run /dev/shm; do
  mount -t tmpfs -o "mode=1777,size=$size" tmpfs "$path"
done
chmod 755 /run
for i in "${!shared[@]}"; do
  fd=${held[i]}
  mkdir -p "${shared[i]}"
  mount --no-canonicalize --bind "/proc/self/fd/$fd" "${shared[i]}"
  exec {fd}<&-
done
mount --bind "$dir/etc/hosts" /etc/hosts
mount -t proc proc /proc
ip link set lo up

export SLURM_CONF=$dir/etc/slurm.conf PATH=$PATH:/usr/sbin:/sbin
if [ "$name" = login ]; then
  ip link add br0 type bridge
  ip link set br0 up
  ip addr add "$ip/24" dev br0
fi
echo "$host_pid" >"$dir/run/$name.init.new"
mv "$dir/run/$name.init.new" "$dir/run/$name.init"
if [ "$name" != login ]; then
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done # plugged in from outside
  ip addr add "$ip/24" dev eth0
  ip link set eth0 up
  ip route add default via 10.77.0.1
fi

mkdir -p /run/munge /run/munge-seed /run/slurmd
munged --key-file="$dir/munge/munge.key" --socket=/run/munge/munge.sock --pid-file=/run/munge/munged.pid \
  --log-file="$dir/log/munged-$name.log" --seed-file=/run/munge-seed/seed --force 2>>"$dir/log/munged-$name.out"
if [ "$name" = login ]; then
  slurmctld -D -i >>"$dir/log/slurmctld.out" 2>&1 &
else
  slurmd -D -N "$name" >>"$dir/log/$name.out" 2>&1 &
fi
trap 'exit 0' TERM
while :; do # reap orphans for ever
  wait || true
  sleep 1 &
  wait $! || true
done
