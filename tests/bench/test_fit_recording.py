"""The load that has what a fit needs, against a real agent with a scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.bench.fit_recording import record
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.config.script_settings import script_settings
from prorl_hpc.inference.request_records import read_requests
from prorl_hpc.tasks.testing import write_chat_model


@pytest.mark.timeout(120)
def test_a_recorded_load_is_enough_for_a_fit(tmp_path: Path) -> None:
    script = {"first_token_s": 0.02, "first_token_s_per_1k": 0.1, "token_s": 0.002, "cache_tokens": 20_000}
    said: list[str] = []
    engine = EngineConfig(kind="scripted", script=script)
    found = record(write_chat_model(tmp_path / "model"), engine, 4.0, 4, said.append, tmp_path / "kept")
    assert said[-3:] == ["1 conversations at once", "2 conversations at once", "4 conversations at once"]
    assert found.requests >= 100
    settings = script_settings(found.settings)
    assert settings.cache_tokens == 20_000 and settings.token_s > 0
    (server,) = read_requests(tmp_path / "kept")
    assert [by.engine for by in server.served_by] == ["scripted"]
    assert any(record.cached_tokens for record in server.records)
