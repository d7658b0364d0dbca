"""The code of docs/bring-your-own-trainer.md does what it says there, and its commands and files exist."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from examples_service import EXAMPLES

from prorl_hpc.__main__ import VERBS
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.inference import WeightProbe
from prorl_hpc.service.client import RolloutClient

DOCUMENT = EXAMPLES.parent / "docs" / "bring-your-own-trainer.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_its_commands_and_files_exist() -> None:
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if words[1:3] == ["-m", "prorl_hpc"]:
            assert words[3] in VERBS, line
        elif words[1].endswith(".py"):
            assert (EXAMPLES.parent / words[1]).exists(), line
    for link in re.findall(r"\]\(([^)#:]+)\)", DOCUMENT.read_text()):
        assert (DOCUMENT.parent / link).exists(), link


@pytest.mark.slow
@pytest.mark.train
@pytest.mark.timeout(600)
async def test_its_code_runs(service: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(service.load_config().run.root).parent)  # where runs/latest is
    connect, rows, step, publish, table = blocks("python")
    said: dict[str, Any] = {}
    for block in (connect, rows, step, publish):
        exec(block, said)
    async with RolloutClient(said["endpoints"]["http"], said["token"]) as client:
        samples, used = await said["samples_of_step"](client, f"docs-{time.time_ns()}", said["rows"][:16])
        assert 4 <= used <= 16 and len({group for *_, group, _, _ in samples}) == 4
        for ids, mask, logprobs, reward, _, version, finish in samples:
            assert len(ids) == len(mask) == len(logprobs) and any(mask) and reward in (0.0, 1.0)
            assert finish and version == (await client.policies())[0].newest_version

        model = Path(service.load_config().model.path)
        files = [str(path) for path in model.glob("*.safetensors")]
        with pytest.raises(RuntimeError, match="does not serve the trainer's weights"):
            await said["hand_over"](client, version + 1, files, WeightProbe([10, 11, 12], [-0.001, -0.001], 0.05))
        await said["hand_over"](client, version + 2, files, None)
        assert (await client.policies())[0].newest_version == version + 2

    deadline = time.monotonic() + 60
    while not list(service.rollouts.glob("docs-*.parquet")):
        assert time.monotonic() < deadline, "the rollouts of a batch get onto disk a little after it was given out"
        await asyncio.sleep(0.2)
    exec(table, said)
    assert len(said["table"]) >= len(samples)
