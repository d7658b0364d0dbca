"""One rollout service for all examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples_service import rollout_service

from prorl_hpc.config.run_directory import RunDirectory


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    pytest.importorskip("transformers", reason="the examples need the extra [train]")
    with rollout_service(tmp_path_factory.mktemp("examples")) as run:
        yield run
