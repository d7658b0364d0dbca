"""The recorded keys of DeepSpeed's sections are those of the DeepSpeed that is installed."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from prorl_hpc.config.deepspeed_keys import RECORDED, STRICT

pytestmark = pytest.mark.train


def test_the_record_is_that_of_the_installed_deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="compares the record with the installed DeepSpeed: pip install deepspeed")
    installed = tuple(map(int, version("deepspeed").split(".")[:2]))
    if installed < RECORDED:
        pytest.skip(f"the record is of DeepSpeed {RECORDED}, installed is the older {installed}")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {"bf16": DeepSpeedBF16Config, "comms_logger": CommsLoggerConfig, "zero_optimization": DeepSpeedZeroConfig}
    found = dict(entry for name, model in models.items() for entry in sections(name, model))
    assert found == STRICT, "write these into config/deepspeed_keys.py, and the version into RECORDED"
    assert installed == RECORDED


def sections(name: str, model: Any) -> Iterator[tuple[str, frozenset[str]]]:
    """Of a class of DeepSpeed's settings and of those within it: dotted name, and the keys that it takes."""
    assert model.model_config["extra"] == "forbid"
    fields = model.model_fields
    yield name, frozenset(fields) | {field.alias for field in fields.values() if field.alias}
    for key, field in fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if hasattr(kind, "model_fields"):
                yield from sections(f"{name}.{key}", kind)
