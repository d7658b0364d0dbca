"""What an agent must not be able to do, tried from inside: as whoever runs the tests and as an ordinary user.

Each attack prints GOT-IN when it works. Where it is harmless, it is also run in the local runtime, which isolates
nothing, to show that it would have worked.
"""

from __future__ import annotations

import json
import secrets
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandbox_people import Person, person

pytestmark = pytest.mark.apptainer

GOT_IN = "GOT-IN"
TOKEN = secrets.token_hex(8)


def python(program: str) -> str:
    return f"python3 - <<'END'\n{textwrap.dedent(program)}\nEND"


CONNECT = """
import socket
s = socket.socket({family})
s.settimeout(2)
s.connect({address})
print("GOT-IN")
"""
PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.ptrace(16, {pid}, 0, 0) == 0:
    print("GOT-IN")
    os.waitpid({pid}, 0x40000000)
    libc.ptrace(17, {pid}, 0, 0)
"""
KEYS = """
import ctypes
if ctypes.CDLL(None).syscall({"x86_64": 250, "aarch64": 219}[__import__("os").uname().machine], 0, -3, 0) > 0:
    print("GOT-IN")
"""
OPEN_KERNEL_FILES = """
import os
for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/sys"):
    for where, _, names in os.walk(top):
        for path in (os.path.join(where, name) for name in names if name != "ns_last_pid"):  # the PID namespace's own
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # nothing is written
                print("GOT-IN", path)
            except OSError:
                pass
try:
    os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
    print("GOT-IN")
except OSError:
    pass
"""
NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x00020000, 0x02000000, 0x10000000 | 0x00020000 | 0x40000000):
    if libc.unshare(flag) == 0:
        print("GOT-IN unshare", hex(flag))
for name in os.listdir("/proc/1/ns") + os.listdir("/proc/self/ns"):
    try:
        if libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0:
            print("GOT-IN setns", name)
    except OSError:
        pass
"""

# name → (command, whether it must work in the local runtime; None: it is not tried there)
ATTACKS: dict[str, tuple[str, bool | None]] = {
    "a host file": ("grep -q {token} {secret} && echo GOT-IN", True),
    "a file in the home directory": ("grep -q {token} {home}/.token && echo GOT-IN", True),
    "the host's passwords": ("grep -q . /etc/shadow && echo GOT-IN", None),
    "the host's environment": ("cat /proc/*/environ 2>&- | grep -aq {token} && echo GOT-IN", True),
    "environment variables": ("env | grep -q {token} && echo GOT-IN", None),
    "another sandbox's workspace": ("grep -rqs {token} {runtime_dir} /proc/*/root/workspace && echo GOT-IN", True),
    "a host Unix socket": (python(CONNECT.format(family="socket.AF_UNIX", address="'{socket}'")), True),
    "an abstract Unix socket": (python(CONNECT.format(family="socket.AF_UNIX", address="'\\0{abstract}'")), True),
    "a host TCP port": (python(CONNECT.format(family="socket.AF_INET", address="('127.0.0.1', {port})")), True),
    "the host's own address": (python(CONNECT.format(family="socket.AF_INET", address="('{address}', {port})")), None),
    "the internet": (python(CONNECT.format(family="socket.AF_INET", address="('1.1.1.1', 53)")), None),
    "a host process's existence": ("test -d /proc/{pid} && echo GOT-IN", True),
    "a signal to a host process": ("kill -CONT {pid} && echo GOT-IN", True),
    "a signal to all": ("kill -CONT -1 2>&-; kill -CONT {pid} && echo GOT-IN", None),
    "ptrace of a host process": (python(PTRACE.replace("{pid}", "{pid}")), None),
    "ptrace of the tool server": (python(PTRACE.replace("{pid}", "1")), None),
    "the tool server's log": ("echo x >> /proc/1/fd/2 && echo GOT-IN", None),
    "the image": ("for f in / /etc /usr /usr/bin /opt; do touch $f/x && echo GOT-IN; done", None),
    "the image's files": (
        "for f in /usr/bin/env /usr/lib/os-release /.singularity.d/actions/exec; do : >> $f && echo GOT-IN; done",
        None,
    ),
    "the tool server's code": (
        "find /.prorl -path /.prorl/s -prune -o -writable -print | grep -q . && echo GOT-IN",
        None,
    ),
    "what the tool server runs": ("rm -rf /.prorl/kit /.prorl/code; test -e /.prorl/kit/ld.so || echo GOT-IN", None),
    "mounts": (
        "for m in '-t tmpfs none /mnt' '-o remount,rw /usr' '-o bind /tmp /usr' '-t proc none /mnt' '-t cgroup2 none /mnt';"
        "do mount $m && echo GOT-IN; done; umount /usr && echo GOT-IN; umount -l /proc && echo GOT-IN",
        None,
    ),
    "namespaces": (python(NAMESPACES), None),
    "a user namespace": ("unshare -U true && echo GOT-IN; unshare -Urm true && echo GOT-IN", True),
    "capabilities": (
        "grep -E 'Cap(Prm|Eff|Bnd|Amb)' /proc/self/status | grep -vq 0000000000000000 && echo GOT-IN",
        None,
    ),
    "the kernel's settings": (python(OPEN_KERNEL_FILES), None),
    "device files": ("mknod /tmp/d b 8 0 && echo GOT-IN; find /dev -type b | grep -q . && echo GOT-IN", None),
    "the session's keys": (python(KEYS), True),
}


@pytest.fixture(scope="module", params=["me", "ordinary"])
def who(request: pytest.FixtureRequest) -> Iterator[Person]:
    with person(request.param) as found:
        yield found


class Targets:
    """What there is on the node to be attacked."""

    def __init__(self, who: Person) -> None:
        self.process = who.start("sleep", "600")
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0prorl-{TOKEN}")
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(who.directory / "socket"))
        (who.directory / "socket").chmod(0o777)
        for listener in (self.abstract, self.unix):
            listener.listen(20)
        for path in (who.directory / "secret", who.directory / ".token"):
            path.write_text(TOKEN)
        self.values = {
            "token": TOKEN,
            "secret": who.directory / "secret",
            "home": who.directory,
            "runtime_dir": who.directory / f"prorl-{who.uid}-t",
            "socket": who.directory / "socket",
            "abstract": f"prorl-{TOKEN}",
            "port": self.tcp.getsockname()[1],
            "address": _own_address(),
            "pid": self.process.pid,
        }
        self._closing = threading.Event()

    def filled(self, command: str) -> str:
        for name, value in self.values.items():
            command = command.replace(f"{{{name}}}", str(value))
        return command

    def close(self) -> None:
        for listener in (self.tcp, self.abstract, self.unix):
            listener.close()
        Path(self.values["socket"]).unlink()
        self.process.kill()
        self.process.wait()


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def attack(who: Person, kind: str, names: list[str]) -> dict[str, str]:
    """Attack → what it printed."""
    targets = Targets(who)
    secrets_in_env = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "PRORL_TEST_SECRET", "SSH_AUTH_SOCK"), TOKEN)
    try:
        steps: list[list[Any]] = [["victim", "upload", "token", TOKEN], ["attacker", "upload", "mine", "mine"]]
        steps += [["attacker", "call", "bash", {"command": targets.filled(ATTACKS[name][0])}, 20.0] for name in names]
        steps += [["victim", "download", "token"]]
        results = who.run(kind, steps, env=secrets_in_env)
        assert targets.process.poll() is None
    finally:
        targets.close()
    assert results[-1] == {"output": TOKEN}
    return {name: json.dumps(result) for name, result in zip(names, results[2:-1], strict=True)}


@pytest.fixture(scope="module")
def attacks(who: Person) -> dict[str, str]:
    return attack(who, "apptainer", list(ATTACKS))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, attacks: dict[str, str]) -> None:
    assert GOT_IN not in attacks[name]
    assert TOKEN not in attacks[name] and "error" not in json.loads(attacks[name])


def test_the_attacks_work_where_nothing_is_isolated(who: Person) -> None:
    shown = [name for name, (_, works) in ATTACKS.items() if works]
    results = attack(who, "local", shown)
    assert [name for name, result in results.items() if GOT_IN not in result] == []


def test_no_path_leaves_the_workspace(who: Person) -> None:
    links = "ln -s /etc/passwd file; ln -s /etc dir; ln -s ../../.. up; ln -s /proc/self/root root; ln /etc/passwd hard"
    outside = ["../x", "/etc/passwd", "a/../../x", "file", "dir/passwd", "up/etc/passwd", "root/etc/passwd", "/tmp/x"]
    steps: list[list[Any]] = [["a", "call", "bash", {"command": links}, 20.0]]
    steps += [["a", "download", path] for path in outside]
    steps += [["a", "upload", path, "x"] for path in outside]
    linked, *results = who.run("apptainer", [*steps, ["a", "call", "bash", {"command": "cat /etc/passwd"}, 20.0]])
    assert linked["exit_code"] != 0  # a hard link to what is outside cannot be made
    assert [path for path, result in zip(outside * 2, results[:-1], strict=True) if "error" not in result] == []
    assert results[-1]["output"] != "x"


def test_a_patch_takes_nothing_from_outside(who: Person) -> None:
    prepare = "git init -q; git config user.email a@b; git config user.name a; git commit -q --allow-empty -m a; ln -s /etc/passwd p; ln -s /etc d"
    prepared, patch = who.run(
        "apptainer",
        [["a", "call", "bash", {"command": prepare}, 20.0], ["a", "call", "patch", {}, 20.0]],
    )
    assert prepared["exit_code"] == 0
    assert "root:" not in patch["output"] and "+/etc/passwd" in patch["output"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("setsid bash -c \"trap '' TERM HUP INT; exec -a {mark} sleep 700\" & disown", id="session"),
        pytest.param("( ( setsid bash -c 'exec -a {mark} sleep 700' & ) & )", id="double-fork"),
        pytest.param(
            "nohup bash -c 'trap \"\" TERM HUP; while :; do : {mark}; sleep 0.1; done' >&- 2>&- &", id="ignores"
        ),
    ],
)
def test_nothing_is_left_behind(command: str, who: Person) -> None:
    mark = f"left-{secrets.token_hex(6)}"
    started = command.replace("{mark}", mark)
    begun, seen, stopped = who.run(
        "apptainer",
        [
            ["a", "call", "bash", {"command": f"{started}\nsleep 0.3"}, 20.0],
            [
                "a",
                "call",
                "bash",
                {"command": f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -ao {mark} | head -1"},
                20.0,
            ],
            ["a", "stop"],
        ],
    )
    assert begun["exit_code"] == 0 and mark in seen["output"] and stopped == {}
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())] == []


EXHAUSTION = {
    "memory": ("python3 -c 'x=[]\nwhile 1: x.append(bytearray(8 << 20))'", r"of memory"),
    "files in memory": ("head -c 900M /dev/zero > /dev/shm/x; sleep 2", r"of memory"),
    "disk": ("head -c 60M /dev/zero > big; sleep 3", r"of disk"),
    "unnamed files": ("exec 3>x; rm x; head -c 60M /dev/zero >&3; sleep 3", r"of disk"),
    "processes": (":(){ :|:& };: ; sleep 6", r"processes"),
}


@pytest.mark.parametrize("what", EXHAUSTION)
def test_exhaustion_ends_the_sandbox_at_most_and_is_said(what: str, who: Person) -> None:
    command, said = EXHAUSTION[what]
    greedy, after, other, stopped = who.run(
        "apptainer",
        [
            ["greedy", "call", "bash", {"command": command}, 15.0],
            ["greedy", "call", "bash", {"command": "rm -f big x /dev/shm/x; sleep 0.3; echo well"}, 15.0],
            ["other", "call", "bash", {"command": "echo well"}, 15.0],
            ["greedy", "stop"],
        ],
    )
    text = greedy.get("output", "") + greedy.get("error", "")
    assert said in text and not greedy.get("timed_out"), greedy
    assert "error" in greedy or after["output"].endswith("well\n") or said in after.get("error", "")
    assert other["output"] == "well\n" and stopped == {}


def test_files_have_a_size_limit(who: Person) -> None:
    (result,) = who.run("apptainer", [["a", "call", "bash", {"command": "truncate -s 600M x; stat -c %s x"}, 15.0]])
    assert result["output"].splitlines()[-1] == "0", result
