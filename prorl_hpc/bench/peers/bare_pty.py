"""``bare_pty.py SITE CALLS COMMAND [FLAG …]``, inside a sandbox: the floor of a shell's round trips.

bash, with FLAGs, on a ptyprocess terminal as it comes: write COMMAND, in which {mark} stands for a new word, and read
until that word comes back. No exit code, no directory, no limit, no server. Prints a JSON list of seconds. Two flags are
ours: --raw has the terminal leave line ends alone, --warm-up=N makes so many calls before those that count.
"""

from __future__ import annotations

import json
import os
import sys
import termios
import time

site, calls, command, *flags = sys.argv[1:]
sys.path.append(site)

import ptyprocess  # noqa: E402

_WARM_UP = "--warm-up="


def round_trip(shell: ptyprocess.PtyProcess, mark: bytes) -> float:
    text = command.replace("{mark}", mark.decode()).encode() + b"\n"
    began = time.perf_counter()
    shell.write(text)
    tail = b""
    while mark not in tail:
        tail = tail[-len(mark) :] + shell.read(65536)
    return time.perf_counter() - began


def main() -> None:
    own = [flag for flag in flags if flag == "--raw" or flag.startswith(_WARM_UP)]
    warm_up = next((int(flag[len(_WARM_UP) :]) for flag in own if flag.startswith(_WARM_UP)), 3)
    argv = ["bash", "--norc", "--noprofile", *(flag for flag in flags if flag not in own)]
    shell = ptyprocess.PtyProcess.spawn(argv, env={**os.environ, "PS1": "", "PS2": ""}, echo=False)
    if "--raw" in flags:
        mode = termios.tcgetattr(shell.fd)
        mode[1] &= ~termios.OPOST
        termios.tcsetattr(shell.fd, termios.TCSANOW, mode)
    seconds = [round_trip(shell, f"mark-{number:06d}".encode()) for number in range(warm_up + int(calls))]
    shell.terminate(force=True)
    print(json.dumps(seconds[warm_up:]))


main()
