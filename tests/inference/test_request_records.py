"""What an agent writes of each request, and what of it is read."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_site import ENDLESS, endless, open_site
from waiting import until

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.script_settings import ScriptSettings, script_errors
from prorl_hpc.inference.request_records import RequestRecords, read_requests
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason
from prorl_hpc.messages.rollout import SamplingParams


@pytest.fixture
def times() -> Iterator[Any]:
    """A clock that goes on by one second at each look."""
    return itertools.count(0.0, 1.0)


def test_running_requests_are_those_in_the_engine(tmp_path: Path, times: Any) -> None:
    records = RequestRecords(tmp_path / "requests" / "inference-0.jsonl", "vllm 1", "n1", lambda: next(times))
    first = records.begin()
    second = records.begin()
    first.answer = Completion([1, 2], [-1.0, -1.0], FinishReason.STOP, [], cached_prompt_tokens=32)
    records.end(first, prompt_tokens=40, queued_s=0.5)
    records.end(second, prompt_tokens=7, queued_s=0.0)
    records.close()
    (server,) = read_requests(tmp_path / "requests")
    assert (server.server, [by.engine for by in server.served_by]) == ("inference-0", ["vllm 1"])
    done, failed = server.records
    assert (done.seconds, done.queued_s, done.prompt_tokens, done.cached_tokens) == (2.0, 0.5, 40, 32)
    assert (done.generated_tokens, done.reason, done.running_at_start, done.running) == (2, "stop", 1, 1.5)
    assert (failed.generated_tokens, failed.reason, failed.running_at_start, failed.running) == (0, "", 2, 1.5)


def test_a_cut_last_line_is_left_out_and_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "inference-0.jsonl"
    head = b'{"type":"engine","engine":"vllm 1","node":"n","cpus":2}\n'
    path.write_bytes(head + b'{"type":"requ')
    assert read_requests(tmp_path)[0].records == []
    path.write_bytes(b"{}\n" + head)
    with pytest.raises(ConfigError, match=r"inference-0\.jsonl, line 1: not the record"):
        read_requests(tmp_path)


def test_an_agent_that_starts_again_begins_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "inference-0.jsonl"
    path.write_bytes(b'{"type":"engine","engine":"vllm 1","node":"n","cpus":2}\n{"type":"request","began":1')
    records = RequestRecords(path, "vllm 1", "n")
    records.end(records.begin(), 1, 0.0)
    records.close()
    (server,) = read_requests(tmp_path)
    assert (len(server.served_by), len(server.records), server.cut_lines) == (2, 1, [2])


RECORD = (
    b'{"type":"request","began":1.0,"seconds":0.5,"queued_s":0.0,"prompt_tokens":24,"cached_tokens":0,'
    b'"generated_tokens":25,"running_at_start":2,"running":2.0,"reason":"stop"}'
)


@pytest.mark.parametrize(
    "line",
    [
        RECORD[:70] + b"\n" + RECORD,
        RECORD.replace(b"0.5", b"-0.5"),
        RECORD.replace(b"0.5", b"NaN"),
        RECORD.replace(b"0.5", b"1e999"),
        RECORD.replace(b"0.5", b'"0.5"'),
        RECORD.replace(b"24", b"-24"),
        RECORD.replace(b"24", b"9999999999999999999999"),
        RECORD.replace(b'cached_tokens":0', b'cached_tokens":25'),
        RECORD.replace(b'start":2', b'start":0'),
        RECORD.replace(b"stop", b"\xff"),
        b"\x93\xff\x00 abc",
        b"[]",
    ],
)
def test_a_line_that_no_agent_wrote_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "inference-0.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=r"inference-0\.jsonl, line 1: not the record of a request: .*record anew"):
        read_requests(tmp_path)


def test_an_empty_record_has_no_requests(tmp_path: Path) -> None:
    (tmp_path / "inference-0.jsonl").touch()
    assert read_requests(tmp_path)[0].records == []


def test_a_full_disk_ends_the_recording_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = RequestRecords(tmp_path / "r.jsonl", "vllm 1", "n1")
    records._file = Full()  # type: ignore[assignment]
    for _ in range(3):
        records.end(records.begin(), 1, 0.0)
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


class Full:
    closed = False

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.closed = True


async def test_an_agent_records_each_request_with_its_time_at_the_gate(socket_dir: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine({(1, 2): [7, 8]}, ScriptSettings(token_s=0.02))
    async with open_site(socket_dir, engine, slots=1) as site:
        site.agent._requests._records = RequestRecords(tmp_path / "inference-0.jsonl", "scripted", "here")
        worker = site.worker()
        llms = [worker.for_rollout(site.ref, f"r{i}") for i in range(3)]
        await asyncio.gather(*(llm.generate([1, 2], SamplingParams()) for llm in llms))
        with pytest.raises(InferenceError):
            await llms[0].generate([5], SamplingParams())
        await worker.close()
    (server,) = read_requests(tmp_path)
    assert [record.reason for record in server.records] == ["stop", "stop", "stop", ""]
    assert all(record.running == 1 and record.generated_tokens == 2 for record in server.records[:3])
    assert max(record.queued_s for record in server.records) >= 0.04  # behind two others: it cannot be less


async def test_an_aborted_request_frees_its_place_long_before_its_first_token(socket_dir: Path) -> None:
    async with open_site(socket_dir, ScriptedEngine(endless, ScriptSettings(first_token_s=3600.0))) as site:
        worker = site.worker()
        task = asyncio.create_task(worker.for_rollout(site.ref, "r").generate([1], ENDLESS))
        await until(lambda: site.in_engine() == 1)
        task.cancel()
        await until(lambda: site.in_engine() == 0)
        await worker.close()


def test_recording_without_servers_of_the_run_is_refused() -> None:
    config = ProrlConfig()
    config.engine.record_requests = True
    assert list(script_errors(config)) == []
    config.cluster.inference.nodes = 0
    (error,) = script_errors(config)
    assert "engine.record_requests=true with cluster.inference.nodes=0" in error
