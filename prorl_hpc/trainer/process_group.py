"""How the ranks find each other: no launcher, no fixed port.

Rank 0 binds a TCPStore to a port that the system picks and publishes host, port and a random word in
``state/trainer-group.json``; the others read it and check the word, so a file left by an earlier job is no trap.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.ranks import own_gpu

WAIT_FOR_RANK_0 = timedelta(days=30)
"""Ranks sit in a broadcast while rank 0 waits for rollouts. A rank that dies closes its connections, which ends the wait."""


class GroupAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    word: str


def join(state: Path, *, rank: int, world: int, local_rank: int, host: str, timeout_s: float) -> dist.ProcessGroup:
    """Make the default process group (NCCL with GPUs, else gloo); returns a gloo group for commands between the ranks.
    ``host`` is the address that other nodes reach this one at. Raises RunError when the ranks do not meet in time."""
    if torch.cuda.is_available():
        local_rank = own_gpu(local_rank, torch.cuda.device_count())  # DeepSpeed and the engine read LOCAL_RANK
        torch.cuda.set_device(local_rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank))
    timeout = timedelta(seconds=timeout_s)
    store: dist.Store
    if world == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface("127.0.0.1"))
        store = dist.HashStore()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(host))
        file = state / "trainer-group.json"
        store = _serve(file, host, world, timeout) if rank == 0 else _connect(file, world, timeout)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        # Only this group has to outlast the waiting for rollouts.
        return dist.new_group(backend="gloo", timeout=WAIT_FOR_RANK_0)
    except (RuntimeError, dist.DistStoreError) as error:
        raise RunError(
            f"rank {rank}: the {world} trainer ranks did not meet within {timeout_s:.0f} s at {host}: {error}. "
            "Do all trainer processes run? Is cluster.interface right?"
        ) from error


def _serve(file: Path, host: str, world: int, timeout: timedelta) -> dist.Store:
    # The port is bound here, by the process that serves it; 0 lets the system choose.
    store = dist.TCPStore("0.0.0.0", 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
    address = GroupAddress(host, store.port, secrets.token_hex(16))
    store.set("word", address.word)
    write_json(file, address)
    return store


def _connect(file: Path, world: int, timeout: timedelta) -> dist.Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        address = read_json(file, GroupAddress)
        if address is not None and _listens(address):
            try:
                store = dist.TCPStore(
                    address.host, address.port, world, is_master=False, timeout=timeout, wait_for_workers=False
                )
                if store.get("word").decode() == address.word:
                    return store
            except (RuntimeError, dist.DistStoreError):
                pass  # a leftover file whose port now belongs to something else: read it again
        time.sleep(0.2)
    raise RunError(
        f"trainer rank 0 could not be reached within {timeout.total_seconds():.0f} s; its address is in {file}"
    )


def _listens(address: GroupAddress) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=2.0):
            return True
    except OSError:
        return False


def _interface(address: str) -> str:
    """Name of the interface with this address: gloo would else ask what the host's name resolves to."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return str(name)
    return "lo"
