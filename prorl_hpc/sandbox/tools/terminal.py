"""Pseudo-terminals that change no byte and echo nothing."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from prorl_hpc.sandbox.tools.output import READ_BYTES

ROWS, COLUMNS = 24, 120
_READS = 64
"""Reads per event: others must have their turn."""
_FULL_BYTES = 2048
"""The kernel gives up to 4 KiB with each read; after much less than that there is hardly more."""


def set_mode(fd: int, *, typed: bool = False) -> None:
    """Either end's ``fd`` will do. ``typed``: lines can be typed into it, and Ctrl-C, Ctrl-D and so on mean something."""
    mode = termios.tcgetattr(fd)
    before = mode[:4]
    mode[0] = termios.ICRNL if typed else 0
    mode[1] = 0
    mode[3] = termios.ICANON | termios.ISIG | termios.IEXTEN if typed else 0
    if mode[:4] != before:
        termios.tcsetattr(fd, termios.TCSANOW, mode)


class Terminal:
    """One for output. We hold the slave as well, or it would hang up between two programs."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.name = os.ttyname(self.slave)
        set_mode(self.slave)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(self.master, False)

    def let_go(self) -> None:
        """Of the slave: once nobody else has it, reading ends."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1


def read_available(fd: int) -> tuple[list[bytes], bool]:
    """What can be read from a master now, and whether it hung up."""
    pieces: list[bytes] = []
    try:
        while len(pieces) < _READS:
            data = os.read(fd, READ_BYTES)
            if not data:
                return pieces, True
            pieces.append(data)
            if len(data) < _FULL_BYTES:
                break
    except BlockingIOError:
        pass
    except OSError:  # EIO: nobody has the other side open any more
        return pieces, True
    return pieces, False
