"""A command's way from the agent loop into a sandbox's shell and back, against the floor and against peers.

Ours is the whole way: asyncio call, socket, tool server, bash, terminal, and back, with exit code and directory. The
others are timed by a program inside the same sandbox, which spares them the way into it.
"""

from __future__ import annotations

import time

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.peer_environment import peer_environment
from prorl_hpc.bench.samples import Samples, Side, in_turns, ratio, told_ratio
from prorl_hpc.bench.sandbox_bed import SandboxBed
from prorl_hpc.messages.errors import RunError
from prorl_hpc.sandbox.protocol import Sandbox

SWE_REX_VERSION = "1.4.0"
_FILES = " ".join(f"file-{number:02d}" for number in range(20))
_COMMANDS = {"echo hello": "hello", "ls": _FILES}
"""Command → the words that it must print."""
_CALL_S = 20.0
_WARM_UP = 3
_TURN = 10
_STEADY_WARM_UP, _STEADY_TURN = 150, 50
"""Of what is measured in a row: after something else has run, a core takes some hundred round trips until it wakes
those that wait as quickly as it can."""


async def against_floor(calls: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    async with SandboxBed.open(kind) as bed:
        figures = []
        for command in _COMMANDS:
            floor = "echo {mark}" if command.startswith("echo") else f"{command}; echo {{mark}}"
            steady = f"--warm-up={_STEADY_WARM_UP}"
            bare = _program(bed, "bare_pty.py", floor, steady)
            without_editing = _program(bed, "bare_pty.py", floor, steady, "--noediting")
            ours, theirs, least = await _compare(bed, calls, command, bare, without_editing, steady=True)
            say(f"{command}: ours {ours}, bare pty {theirs}, without line editing {least}")
            name = f"bash `{command}`"
            figures += ratio(name, ours, theirs, 2.5, "bare ptyprocess")
            figures += told_ratio(name, ours, least, "bare ptyprocess, bash without line editing")
            first, first_bare = await _compare(bed, calls, command, _program(bed, "bare_pty.py", floor))
            say(f"{command}, the first ten after something else: ours {first}, bare pty {first_bare}")
            figures += told_ratio(f"{name}, the first ten in a row", first, first_bare, "bare ptyprocess")
    return figures


async def against_tmux(calls: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    async with SandboxBed.open(kind) as bed:
        figures = []
        for command in _COMMANDS:
            polled = _program(bed, "tmux_shell.py", command, "0.01")
            eager = _program(bed, "tmux_shell.py", command, "0")
            ours, theirs, at_once = await _compare(bed, calls, command, polled, eager)
            say(f"{command}: ours {ours}, tmux {theirs}, looking at once and without pause {at_once}")
            name, against = f"bash `{command}`", "tmux, screen read every 10 ms"
            # What `ls` itself takes is more than a thirtieth of tmux's time already: no shell could hold that.
            figures += (
                ratio(name, ours, theirs, 1 / 30, against)
                if command.startswith("echo")
                else told_ratio(name, ours, theirs, against)
            )
            figures += told_ratio(name, ours, at_once, "tmux, screen read at once and without pause")
    return figures


async def against_swe_rex(calls: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    async with SandboxBed.open(kind) as bed:
        site = await bed.bring_environment(peer_environment("swe-rex", SWE_REX_VERSION, say))
        figures = []
        for command in _COMMANDS:
            ours, theirs = await _compare(bed, calls, command, _program(bed, "swe_rex_session.py", command, site=site))
            say(f"{command}: ours {ours}, SWE-ReX {theirs}")
            figures += ratio(f"bash `{command}`", ours, theirs, 1 / 2, f"SWE-ReX {SWE_REX_VERSION}, local session")
    return figures


def _program(bed: SandboxBed, program: str, command: str, *flags: str, site: str = "") -> Side:
    return lambda count: bed.inside(program, count, command, *flags, site=site)


async def _compare(bed: SandboxBed, calls: int, command: str, *others: Side, steady: bool = False) -> list[Samples]:
    """Ours first. ``steady``: in long turns, each after many calls that do not count."""
    warm_up, turn = (_STEADY_WARM_UP, _STEADY_TURN) if steady else (_WARM_UP, _TURN)
    await bed.sandbox.call("bash", {"command": f"touch {_FILES}"}, _CALL_S)

    async def ours(count: int) -> list[float]:
        return await round_trips(bed.sandbox, command, _COMMANDS[command], count, warm_up)

    return await in_turns(calls, turn, ours, *others)


async def round_trips(sandbox: Sandbox, command: str, prints: str, calls: int, warm_up: int = _WARM_UP) -> list[float]:
    """Seconds of each call. RunError if one does not give what it must."""
    seconds = []
    for _ in range(warm_up + calls):
        began = time.perf_counter()
        result = await sandbox.call("bash", {"command": command}, _CALL_S)
        seconds.append(time.perf_counter() - began)
        if sorted(result.output.split()) != prints.split() or result.exit_code != 0 or not result.cwd:
            raise RunError(f"`{command}` gave {result}")
    return seconds[warm_up:]
