"""What the tool server gives up before it serves, and with it everything that it will ever start.

A container of root's has root's user id on the node, and this alone opens what belongs to root: /proc/sys (whose
core_pattern names a program that the node runs as root), /proc/sysrq-trigger, the files of cgroups. So /proc becomes
read-only, and all capabilities go. And for everybody, nobody inside may make a user namespace, which would give them
back (and most of the kernel's holes have been reached that way), enter another, or look at the keys that the worker's
session holds in the kernel (Kerberos tickets).
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384

_CLONE_NEWUSER = 0x10000000
_EPERM, _ENOSYS = 1, 38
_REFUSED = {
    # audit architecture → (clone, unshare) whose flags count, clone3 whose flags a filter cannot see (callers go on
    # with clone), and setns, add_key, request_key, keyctl, which are refused whole.
    0xC000003E: ((56, 272), 435, (308, 248, 249, 250)),  # x86_64
    0x40000003: ((120, 310), 435, (346, 286, 287, 288)),  # i386, which x86_64 runs as well
    0xC00000B7: ((220, 97), 435, (268, 217, 218, 219)),  # aarch64
    0x40000028: ((120, 337), 435, (375, 309, 310, 311)),  # arm, which aarch64 runs as well
}
_NATIVE = {"x86_64": (0xC000003E, 0x40000003), "aarch64": (0xC00000B7, 0x40000028)}
_FIRST_X32 = 0x40000000
"""System calls of x86_64's third interface, which nothing uses, are refused: they would go round the numbers above."""
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)


def confine() -> None:
    """For a tool server in a container. OSError says what the kernel refused."""
    if os.geteuid() == 0:
        _close_proc()
    _drop_capabilities()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _refuse_system_calls()
    # Nobody inside reads our memory, or opens the log through /proc/1/fd to fill the node's disk.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _close_proc() -> None:
    _mount(b"/proc", _MS_BIND | _MS_REC)
    _mount(b"/proc", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _mount(path: bytes, flags: int) -> None:
    _check(_libc.mount(path, path, None, ctypes.c_ulong(flags), None), f"mount({path.decode()}, {flags})")


def _drop_capabilities() -> None:
    if os.geteuid() == 0:
        for number in range(64):
            if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
                break  # the kernel has no more
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def _refuse_system_calls() -> None:
    architectures = _NATIVE.get(os.uname().machine)
    if architectures is None:
        return  # `prorl-hpc doctor` says what that leaves open
    program = b"".join(struct.pack("HBBI", *step) for step in filter_program(architectures))
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0), "prctl(PR_SET_SECCOMP)")


def filter_program(architectures: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The seccomp filter: (code, steps to skip if true, if false, operand)."""
    program = []
    for architecture in architectures:
        part = _filter_of(*_REFUSED[architecture])
        program += [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 0, len(part), architecture), *part]
    return [*program, (_RETURN, 0, 0, _FAIL | _ENOSYS)]  # another architecture


def _filter_of(flagged: tuple[int, int], clone3: int, whole: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    part = [
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _FIRST_X32),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
        (_JUMP_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
    ]
    for number in whole:
        part += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | _EPERM)]
    part += [
        (_JUMP_EQUAL, 1, 0, flagged[0]),
        (_JUMP_EQUAL, 0, 3, flagged[1]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return part
