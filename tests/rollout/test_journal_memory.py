from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.rollout_store import read_rollouts


def measured(directory: Path, rollouts: int, tokens: int) -> dict[str, float]:
    directory.mkdir()
    code = (
        "import json, sys; from pathlib import Path; from prorl_hpc.bench.journal_memory import measure; "
        f"print(json.dumps(measure(Path(sys.argv[1]), {rollouts}, {tokens})))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, check=True, timeout=120
    )
    figures: dict[str, float] = json.loads(child.stdout)
    return figures


def test_finished_rollouts_do_not_stay_in_memory(tmp_path: Path) -> None:
    figures = measured(tmp_path / "run", 1500, 4000)
    # Kept in memory they would take some 40 MiB as bytes, and ten times that as objects.
    assert figures["rss_peak_mib"] - figures["rss_before_mib"] < 120
    assert figures["rss_after_mib"] <= figures["rss_peak_mib"]
    table = read_rollouts(RunDirectory(tmp_path / "run"), ["cursor"])
    assert sorted(table["cursor"].to_pylist()) == list(range(1, 1501))
    assert figures["parquet_mib"] > 1 and figures["seconds"] > 0
