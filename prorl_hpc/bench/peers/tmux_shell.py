"""``tmux_shell.py SITE CALLS COMMAND POLL_S``, inside a sandbox: a shell by way of tmux, as ProRL-Agent's predecessor had it.

Type COMMAND and a mark with ``tmux send-keys``, then look at the screen with ``tmux capture-pane`` every POLL_S
until the mark stands there, with the exit code. Prints a JSON list of seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time

_, calls, command, poll_s = sys.argv[1:]
_WARM_UP = 3
_GIVE_UP_S = 20.0
_SERVER = ["tmux", "-L", "prorl-bench", "-f", "/dev/null"]


def tmux(*words: str) -> str:
    return subprocess.run([*_SERVER, *words], check=True, capture_output=True, text=True).stdout


def round_trip(number: int) -> float:
    began = time.perf_counter()
    tmux("send-keys", "-t", "0", f"{command}; echo mark-{number:06d}:$?", "Enter")
    answered = re.compile(rf"^mark-{number:06d}:\d+", re.MULTILINE)
    while time.perf_counter() - began < _GIVE_UP_S:
        time.sleep(float(poll_s))
        screen = tmux("capture-pane", "-p", "-t", "0")
        if answered.search(screen):
            return time.perf_counter() - began
    sys.exit(f"the screen of tmux does not show the mark:\n{screen}")


def main() -> None:
    if shutil.which("tmux") is None:
        sys.exit("there is no tmux in the image")
    tmux("new-session", "-d", "-x", "120", "-y", "50", "bash --norc --noprofile")
    try:
        seconds = [round_trip(number) for number in range(_WARM_UP + int(calls))]
    finally:
        tmux("kill-server")
    print(json.dumps(seconds[_WARM_UP:]))


main()
