"""Orders in the journal: accepted, closed, found again. Everything here runs on the journal's thread."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from prorl_hpc.core.events import Unfinished
from prorl_hpc.messages.batch import BatchResult, BatchSpec
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec
from prorl_hpc.rollout.journal_database import Database
from prorl_hpc.rollout.journal_records import CarriedGroup, OpenBatch, OpenRollout
from prorl_hpc.service.errors import conflict, not_found

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_batch_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_batch_spec = msgspec.msgpack.Decoder(BatchSpec)
_rollout_spec = msgspec.msgpack.Decoder(RolloutSpec)
_carried = msgspec.msgpack.Decoder(list[CarriedGroup])
_slim = msgspec.msgpack.Decoder(RolloutResult)
_OF_BATCH = re.compile(r"(.+)\.g\d+\.s\d+")


def json_list(values: Iterable[object]) -> str:
    """A parameter for ``json_each(?)``."""
    return msgspec.json.encode(list(values)).decode()


def batch_of(rollout_id: str) -> str:
    """The batch whose rollout would have this id, or empty."""
    match = _OF_BATCH.fullmatch(rollout_id)
    return match[1] if match else ""


def accept_batch(db: Database, spec: BatchSpec, carried: Sequence[CarriedGroup], closes: str) -> bool:
    name = spec.batch_id
    order = _encode_batch(spec)
    digest = hashlib.sha256(order).digest()
    known = db.execute("SELECT digest FROM orders WHERE epoch = ? AND kind = 'batch' AND name = ?", db.epoch, name)
    if (row := known.fetchone()) is not None:
        _require_same(row[0], digest, "batch", name)
        return False
    require_free(db, name)
    if closes:
        _require_full(db, closes)
    groups = _encoder.encode(list(carried)) if carried else None
    _insert_orders(db, "batch", [(name, digest, order, groups)])
    if carried:
        db.execute(
            "UPDATE results SET batch = ? WHERE epoch = ? AND rollout IN (SELECT value FROM json_each(?))",
            *(name, db.epoch, json_list(spec.rollout_id for group in carried for spec in group.specs)),
        )
    if closes:
        _close(db, closes)
    return True


def require_free(db: Database, batch_id: str) -> None:
    """Raises Refusal 409 if a rollout that was ordered by itself has a name that this batch would give."""
    # '.g' to '.h': all ids that begin with '<name>.g'.
    alone = db.execute(
        "SELECT name FROM orders WHERE epoch = ? AND kind = 'rollout' AND name > ? AND name < ?",
        *(db.epoch, f"{batch_id}.g", f"{batch_id}.h"),
    )
    taken = [rollout for (rollout,) in alone if batch_of(rollout) == batch_id]
    if taken:
        raise conflict(f"rollout {taken[0]!r} was ordered by itself: choose another batch id", "batch_differs")


def accept_rollouts(db: Database, specs: Sequence[RolloutSpec]) -> list[bool]:
    orders = [_encoder.encode(spec) for spec in specs]
    digests = [hashlib.sha256(order).digest() for order in orders]
    known = _digests(db, "rollout", [spec.rollout_id for spec in specs])
    batches = _digests(db, "batch", {batch for spec in specs if (batch := batch_of(spec.rollout_id))})
    new, fresh = [], []
    for spec, order, digest in zip(specs, orders, digests, strict=True):
        name = spec.rollout_id
        if batch_of(name) in batches:
            raise conflict(
                f"rollout {name!r} belongs to batch {batch_of(name)!r}: choose another id", "rollout_differs"
            )
        fresh.append(name not in known)
        if name in known:
            _require_same(known[name], digest, "rollout", name)
        else:
            known[name] = digest
            new.append((name, digest, order, None))
    _insert_orders(db, "rollout", new)
    return fresh


def cancelled_batch(db: Database, batch_id: str) -> None:
    db.execute("INSERT INTO cancels VALUES (?, ?, ?)", db.epoch, batch_id, db.newest)


def finish_batch(db: Database, result: BatchResult, keeps_open: bool) -> None:
    name = result.progress.batch_id
    known = db.execute("SELECT state FROM orders WHERE epoch = ? AND kind = 'batch' AND name = ?", db.epoch, name)
    row = known.fetchone()
    if row is None or row[0] != "running":
        raise RunError(f"batch {name!r} cannot be finished: it is {'unknown' if row is None else row[0]}")
    db.execute(
        "UPDATE orders SET state = 'full', result = ?, progress = ?, finished = ? "
        "WHERE epoch = ? AND kind = 'batch' AND name = ?",
        *(_encoder.encode(result), _encoder.encode(result.progress), db.newest, db.epoch, name),
    )
    if not keeps_open:
        _close(db, name)


def set_paused(db: Database, on: bool) -> None:
    db.execute("UPDATE epochs SET paused = ? WHERE number = ?", int(on), db.epoch)


def batch_column(db: Database, batch_id: str, column: str) -> bytes | None:
    """``progress`` or ``result`` of a batch that has one."""
    sql = f"SELECT {column} FROM orders WHERE epoch = ? AND kind = 'batch' AND name = ?"
    row = db.execute(sql, db.epoch, batch_id).fetchone()
    return None if row is None else row[0]


def batches(db: Database, after: str, limit: int) -> list[str]:
    number = 0
    if after:
        sql = "SELECT number FROM orders WHERE epoch = ? AND kind = 'batch' AND name = ?"
        row = db.execute(sql, db.epoch, after).fetchone()
        if row is None:
            raise not_found("batch", after)
        number = row[0]
    sql = "SELECT name FROM orders WHERE epoch = ? AND kind = 'batch' AND number > ? ORDER BY number LIMIT ?"
    return [name for (name,) in db.execute(sql, db.epoch, number, limit)]


def recover(db: Database) -> tuple[list[OpenBatch | OpenRollout], bool]:
    (paused,) = db.execute("SELECT paused FROM epochs WHERE number = ?", db.epoch).fetchone()
    sql = "SELECT rollout, attempt, spared FROM attempts WHERE epoch = ?"
    noted = {rollout: (attempt, spared) for rollout, attempt, spared in db.execute(sql, db.epoch)}
    rows = db.execute(
        "SELECT kind, name, spec, carried, after_cursor, state, asleep FROM orders "
        "WHERE epoch = ? AND state <> 'closed' ORDER BY number",
        db.epoch,
    ).fetchall()
    carried = {name: tuple(_carried.decode(groups)) for _, name, _, groups, *_ in rows if groups is not None}
    # Carried rollouts count for the batch that has them now; a batch closed meanwhile is not among the rows.
    holder = {spec.rollout_id: name for name, groups in carried.items() for group in groups for spec in group.specs}
    of_batch: dict[str, dict[str, tuple[int, int]]] = {}
    for rollout, numbers in noted.items():
        of_batch.setdefault(holder.get(rollout) or batch_of(rollout), {})[rollout] = numbers
    orders: list[OpenBatch | OpenRollout] = []
    for kind, name, spec, _, after_cursor, state, asleep in rows:
        if kind == "rollout":
            orders.append(OpenRollout(_rollout_spec.decode(spec), *noted.get(name, (1, 0))))
            continue
        before, log = _recorded(db, name, after_cursor)
        its = of_batch.get(name, {})
        attempts = {rollout: attempt for rollout, (attempt, _) in its.items()}
        spared = {rollout: spared for rollout, (_, spared) in its.items() if spared}
        groups = carried.get(name, ())
        orders.append(OpenBatch(_decode_batch(spec), groups, before, log, attempts, state, spared, bool(asleep)))
    return orders, bool(paused)


def begin_attempt(db: Database, unfinished: Sequence[Unfinished], asleep: Sequence[str]) -> None:
    """The rollouts that the attempt of the run before left ``unfinished``, as this one takes them up, and the batches
    that are ``asleep``. All at once: an attempt is begun or it is not."""
    rows = [(db.epoch, one.spec.rollout_id, one.attempt, one.spared) for one in unfinished]
    db.connection.executemany("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)", rows)
    db.execute(
        "UPDATE orders SET asleep = 1 WHERE epoch = ? AND kind = 'batch' AND name IN (SELECT value FROM json_each(?))",
        *(db.epoch, json_list(asleep)),
    )
    db.execute("UPDATE epochs SET attempt = ? WHERE number = ?", db.attempt, db.epoch)
    db.cut_off = False


def woken(db: Database, batch_id: str) -> None:
    db.execute("UPDATE orders SET asleep = 0 WHERE epoch = ? AND kind = 'batch' AND name = ?", db.epoch, batch_id)


def _recorded(
    db: Database, batch: str, after_cursor: int
) -> tuple[tuple[RolloutResult, ...], tuple[RolloutResult | None, ...]]:
    sql = "SELECT cursor, slim FROM results WHERE epoch = ? AND batch = ? ORDER BY cursor"
    results = [(cursor, _slim.decode(slim)) for cursor, slim in db.execute(sql, db.epoch, batch)]
    sql = "SELECT after_cursor, NULL FROM cancels WHERE epoch = ? AND batch = ?"
    # The sort is stable: a cancel comes behind the result whose cursor it has.
    since = [event for event in results if event[0] > after_cursor] + db.execute(sql, db.epoch, batch).fetchall()
    log = sorted(since, key=lambda event: event[0])
    return tuple(result for cursor, result in results if cursor <= after_cursor), tuple(event for _, event in log)


def _encode_batch(spec: BatchSpec) -> bytes:
    """Row by row: one call for a large supply would hold the GIL for too long."""
    head = _encoder.encode(msgspec.structs.replace(spec, rows=[]))
    return _encoder.encode([msgspec.Raw(head), *(msgspec.Raw(_encoder.encode(row)) for row in spec.rows)])


def _decode_batch(order: bytes) -> BatchSpec:
    head, *rows = _batch_parts.decode(order)
    return msgspec.structs.replace(_batch_spec.decode(head), rows=[msgspec.msgpack.decode(row) for row in rows])


def _require_same(known: bytes, digest: bytes, kind: str, name: str) -> None:
    if known != digest:
        message = f"{kind} {name!r} was ordered before with other contents: choose a new id"
        raise conflict(message, f"{kind}_differs")


def _require_full(db: Database, name: str) -> None:
    row = db.execute("SELECT state FROM orders WHERE epoch = ? AND kind = 'batch' AND name = ?", db.epoch, name)
    state = row.fetchone()
    if state is None or state[0] == "running":
        raise RunError(f"batch {name!r} cannot be closed: it has no result yet")


def _close(db: Database, name: str) -> None:
    db.execute(
        "UPDATE orders SET state = 'closed', spec = NULL, carried = NULL WHERE epoch = ? AND kind = 'batch' AND name = ?",
        *(db.epoch, name),
    )
    db.execute("DELETE FROM cancels WHERE epoch = ? AND batch = ?", db.epoch, name)


def _digests(db: Database, kind: str, names: Iterable[str]) -> dict[str, bytes]:
    wanted = list(names)
    if not wanted:
        return {}
    sql = "SELECT name, digest FROM orders WHERE epoch = ? AND kind = ? AND name IN (SELECT value FROM json_each(?))"
    return dict(db.execute(sql, db.epoch, kind, json_list(wanted)).fetchall())


def _insert_orders(db: Database, kind: str, orders: Sequence[tuple[str, bytes, bytes, bytes | None]]) -> None:
    start = 0
    while start < len(orders):  # few sizes of statement: see journal_results
        count = next(size for size in (64, 16, 4, 1) if size <= len(orders) - start)
        parameters: list[Any] = []
        for name, digest, order, carried in orders[start : start + count]:
            parameters += (db.epoch, kind, name, digest, order, carried, db.newest)
        values = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * count)
        db.execute(
            f"INSERT INTO orders (epoch, kind, name, digest, spec, carried, after_cursor) VALUES {values}", *parameters
        )
        start += count
