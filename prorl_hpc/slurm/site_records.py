"""What Slurm's commands say of a site, as records: pure parsers, one for each command's output (Slurm 20.11 to 25.05).

Missing fields are no error: versions and sites differ in what they show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_KEY = re.compile(r"(?<!\S)([A-Z][A-Za-z_]*)=")
_NOTHING = ("", "(null)", "N/A", "n/a", "NONE", "None")
_UNAVAILABLE = ("DOWN", "DRAIN", "FAIL", "FUTURE", "NO_RESPOND", "NOT_RESPONDING", "UNKNOWN")
Version = tuple[int, int]


@dataclass(frozen=True)
class Settings:
    """slurm.conf as ``scontrol show config`` tells it; names in lower case."""

    values: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """The value; empty where Slurm says that there is none, or does not know the setting."""
        value = self.values.get(name.lower(), "")
        return "" if value in _NOTHING else value

    def seconds(self, name: str) -> int | None:
        """``10 sec`` → 10; None if it is not there or no number."""
        found = re.match(r"(\d+)( sec)?$", self.get(name))
        return int(found[1]) if found else None

    def words(self, name: str) -> list[str]:
        """A list that is parted by commas."""
        return [word for word in self.get(name).split(",") if word]


@dataclass(frozen=True)
class Partition:
    """``max_minutes``, ``max_nodes``: None where nothing limits them. ``allow_…``: None allows all."""

    name: str
    default: bool = False
    state: str = "UP"
    max_minutes: int | None = None
    default_minutes: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_mib_per_node: int | None = None
    total_nodes: int = 0
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    needs_reservation: bool = False


@dataclass(frozen=True)
class Node:
    """What jobs can have of a node. ``gpus``: number by type; the type is empty where the site names none."""

    name: str
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_mib: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    state: str = "IDLE"

    @property
    def available(self) -> bool:
        """Whether it is up, busy or not."""
        words = self.state.rstrip("*~#!%$@^-").split("+")
        return not self.state.endswith("*") and not any(word in _UNAVAILABLE for word in words)

    def gpus_of(self, kind: str) -> int:
        """GPUs of a type; all of them for an empty one."""
        if not kind:
            return sum(self.gpus.values())
        return sum(n for name, n in self.gpus.items() if name.lower() == kind.lower())


@dataclass(frozen=True)
class Reservation:
    """``users`` and ``accounts`` are those who may use it."""

    name: str
    state: str = "ACTIVE"
    partition: str = ""
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Association:
    """One line of what a user may charge; ``partition`` is empty where it holds for all."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()


@dataclass(frozen=True)
class Qos:
    name: str
    max_minutes: int | None = None
    flags: tuple[str, ...] = ()


def parse_version(text: str) -> Version | None:
    """``slurm-wlm 22.05.8`` → (22, 5)."""
    found = re.search(r"\b(\d{2})\.(\d{1,2})(?:[.-]|\b)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_settings(text: str) -> Settings:
    """``scontrol show config``."""
    pairs = re.findall(r"^([A-Za-z_]\w*(?:\[\d+\])?)\s*= ?(.*)$", text, re.MULTILINE)
    return Settings({name.lower(): value.strip() for name, value in pairs})


def parse_partitions(text: str) -> list[Partition]:
    """``scontrol show partition -o``."""
    found = [_fields(line) for line in text.splitlines()]
    return [_partition(one) for one in found if "PartitionName" in one]


def parse_nodes(text: str) -> list[Node]:
    """``scontrol show node -o``."""
    found = [_fields(line) for line in text.splitlines()]
    return [_node(one) for one in found if "NodeName" in one]


def parse_reservations(text: str) -> list[Reservation]:
    """``scontrol show reservation -o``."""
    found = [_fields(line) for line in text.splitlines()]
    return [
        Reservation(
            one["ReservationName"],
            one.get("State", ""),
            _named(one.get("PartitionName", "")),
            _list(one.get("Users", "")),
            _list(one.get("Accounts", "")),
        )
        for one in found
        if "ReservationName" in one
    ]


def parse_associations(text: str) -> list[Association]:
    """``sacctmgr -nP show assoc user=… format=account,partition,qos``."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    return [Association(row[0], row[1], _list(row[2])) for row in rows]


def parse_qos(text: str) -> list[Qos]:
    """``sacctmgr -nP show qos format=name,maxwall,flags``."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    return [Qos(row[0], parse_minutes(row[1]), _list(row[2])) for row in rows]


def parse_minutes(text: str) -> int | None:
    """Slurm's times in whole minutes, rounded up: ``90``, ``90:30``, ``02:00:00``, ``1-12``, ``7-00:00:00``. None for no
    limit, or for what is no time."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return int(days or 0) * 1440 + hours * 60 + minutes + (seconds > 0)


def parse_gpus(gres: str) -> dict[str, int]:
    """GPUs by type: ``gpu:a100:4(S:0-1),gpu:2,nvme:1`` → {"a100": 4, "": 2}."""
    found: dict[str, int] = {}
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = word.removeprefix("gres/").replace("=", ":").split(":")
        if name == "gpu":
            count = int(rest[-1]) if rest and rest[-1].isdigit() else 1
            kind = rest[0] if rest and not rest[0].isdigit() else ""
            found[kind] = found.get(kind, 0) + count
    return found


def expand_hosts(text: str) -> list[str]:
    """``gpu[01-03,07],login`` → its names. Only what Slurm writes: numbers and ranges in brackets."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        before, bracket, rest = word.partition("[")
        if not bracket:
            names.append(word)
            continue
        inside, _, after = rest.partition("]")
        for part in inside.split(","):
            low, _, high = part.partition("-")
            width = len(low)
            numbers = range(int(low), int(high or low) + 1) if low.isdigit() and (high or low).isdigit() else []
            names += [name for n in numbers for name in expand_hosts(f"{before}{n:0{width}d}{after}")]
    return names


def _fields(line: str) -> dict[str, str]:
    """``Name=value Other=value with blanks`` → by name; the first of a name counts, for comments may hold anything."""
    pieces = _KEY.split(line)
    found: dict[str, str] = {}
    for key, value in zip(pieces[1::2], pieces[2::2], strict=True):
        found.setdefault(key, value.strip())
    return found


def _partition(one: dict[str, str]) -> Partition:
    return Partition(
        name=one["PartitionName"],
        default=one.get("Default", "").upper() == "YES",
        state=one.get("State", "UP"),
        max_minutes=parse_minutes(one.get("MaxTime", "")),
        default_minutes=parse_minutes(one.get("DefaultTime", "")),
        min_nodes=_number(one.get("MinNodes", "")) or 0,
        max_nodes=_number(one.get("MaxNodes", "")),
        max_cpus_per_node=_number(one.get("MaxCPUsPerNode", "")),
        max_memory_mib_per_node=_number(one.get("MaxMemPerNode", "")),
        total_nodes=_number(one.get("TotalNodes", "")) or 0,
        allow_accounts=_allowed(one.get("AllowAccounts", "ALL")),
        deny_accounts=_list(one.get("DenyAccounts", "")),
        allow_qos=_allowed(one.get("AllowQos", "ALL")),
        deny_qos=_list(one.get("DenyQos", "")),
        needs_reservation=one.get("ReqResv", "").upper() == "YES",
    )


def _node(one: dict[str, str]) -> Node:
    memory = (_number(one.get("RealMemory", "")) or 0) - (_number(one.get("MemSpecLimit", "")) or 0)
    return Node(
        name=one["NodeName"],
        partitions=_list(one.get("Partitions", "")),
        cpus=_number(one.get("CPUEfctv", "")) or _number(one.get("CPUTot", "")) or 0,
        memory_mib=memory,
        gpus=parse_gpus(one.get("Gres", "")),
        features=_list(one.get("AvailableFeatures", "") or one.get("ActiveFeatures", "")),
        state=one.get("State", "").split()[0] if one.get("State") else "UNKNOWN",
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _named(text: str) -> str:
    return "" if text in _NOTHING else text


def _list(text: str) -> tuple[str, ...]:
    return tuple(word for word in _named(text).split(",") if word)


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text.upper() in ("ALL", "") else _list(text)
