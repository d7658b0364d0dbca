"""Models of every family, written once for each file of tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from chat_families import write_family

from prorl_hpc.agents.chat_format import ChatFormat


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def opened(directory: Path) -> Any:
    @functools.cache
    def open_family(family: str, **options: str) -> ChatFormat:
        model = directory / family
        return ChatFormat.open(model if model.is_dir() else write_family(model, family), **options)

    return open_family
