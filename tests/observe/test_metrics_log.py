from __future__ import annotations

from pathlib import Path

from prorl_hpc.observe.metrics import MetricsLog, newest_per_step


def test_appended_records_are_read_in_order(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.append({"kind": "step", "step": 1, "reward": 0.25})
    log.append({"kind": "eval", "step": 1, "note": "zwei\nZeilen"})
    assert log.read() == [
        {"kind": "step", "step": 1, "reward": 0.25},
        {"kind": "eval", "step": 1, "note": "zwei\nZeilen"},
    ]


def test_a_torn_last_line_is_skipped_and_spoils_nothing_after_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with log.path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert log.read() == [{"step": 1}]
    log.append({"step": 3})
    assert log.read() == [{"step": 1}, {"step": 3}]


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_bytes(b'[1]\n\n\xff\xfe\n{"step": 4}\n')
    assert log.read() == [{"step": 4}]


def test_a_resumed_run_overrides_the_steps_it_repeats() -> None:
    records = [
        {"kind": "step", "step": 2, "reward": 0.1},
        {"kind": "eval", "step": 0, "reward": 0.0},
        {"kind": "step", "step": 1, "reward": 0.0},
        {"kind": "step", "step": 2, "reward": 0.3},
        {"kind": "step"},
    ]
    assert [r["reward"] for r in newest_per_step(records, "step")] == [0.0, 0.3]
