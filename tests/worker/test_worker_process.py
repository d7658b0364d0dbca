"""``python -m prorl_hpc.worker`` as the supervisor starts it, with real sandboxes of the local runtime."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from worker_site import Site

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.control import Draining, Goodbye, Shutdown
from prorl_hpc.messages.status import Phase

ROW = {
    "kind": "first",
    "question": "What number is in a.txt?",
    "files": {"a.txt": "fig 4711\n"},
    "answer": "4711",
}


@pytest.fixture
def config(process_config: ProrlConfig) -> ProrlConfig:
    process_config.task.name = "file_quest"
    return process_config


async def test_sigterm_frees_everything_and_exits_0(site: Site) -> None:
    worker = await site.joined()
    assert (await site.init("r1", ROW)).failure is None
    assert site.state().phase is Phase.READY
    worker.send_signal(signal.SIGTERM)
    assert await site.coordinator.expect(Draining) == Draining("worker-0")
    assert await site.coordinator.expect(Goodbye) == Goodbye("worker-0")
    assert await site.exit_code(worker) == 0, site.log.read_text()
    assert site.state().phase is Phase.ENDED
    assert (site.boxes(), site.sandbox_processes()) == ([], [])


async def test_shutdown_exits_0(site: Site) -> None:
    worker = await site.joined()
    assert (await site.init("r1", ROW)).failure is None
    await site.coordinator.order(Shutdown("training is complete"))
    assert await site.exit_code(worker) == 0, site.log.read_text()


class TestLost:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.lost_after_s = 1.0
        return config

    async def test_a_lost_coordinator_is_a_failure_with_its_reason(self, site: Site) -> None:
        worker = await site.joined()
        assert (await site.init("r1", ROW)).failure is None
        site.coordinator.mute = True
        assert await site.exit_code(worker) == 1
        assert site.state().phase is Phase.FAILED
        assert "has not been heard for" in site.state().detail
        assert "Traceback" not in site.log.read_text()


class TestUnusableModel:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        (Path(config.model.path) / "tokenizer_config.json").write_text("{}")
        return config

    async def test_a_model_without_chat_template_is_told(self, site: Site) -> None:
        assert await site.exit_code(site.start()) == 1
        assert "has no chat template" in site.state().detail
        assert "Traceback" not in site.log.read_text()
