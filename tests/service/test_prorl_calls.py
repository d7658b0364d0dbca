"""A client written for ProRL Agent's server: the same calls, bodies and answers; and that server's faults, not had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_run import FakeRun, fake_run
from fake_service import FakeService

from prorl_hpc.messages.rollout import RolloutSpec, Status

JOB: dict[str, Any] = {
    "instance": {"data_source": "t", "instance_id": "i-1", "trajectory_id": 7},
    "sampling_params": {"temperature": 0.6, "top_p": 0.9, "max_tokens": 100, "max_iterations": 30,
                        "token_level_generation": True, "custom_tokenizer": "x", "max_model_len": 9000,
                        "ensure_thinking_end_properly": True, "strict_loop_detector": False, "top_k": -1},
    "job_id": "j",
}  # fmt: skip
ADDRESS = {"address": "http://gpu1:8000/v1"}


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FakeRun]:
    async with fake_run(tmp_path, own_task="t") as made:
        yield made


@pytest.fixture
async def session(run: FakeRun) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(run.socket_path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as made:
        yield made


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with session.post(path, json=body) if body is not None else session.post(path) as response:
        return response.status, await response.json()


async def status(session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
    async with session.get("/status") as response:
        return response.status, await response.json()


async def until_job(run: FakeRun, rollout_id: str) -> None:
    async with asyncio.timeout(10):
        while rollout_id not in run.service.specs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_job_from_start_to_stop(run: FakeRun, session: aiohttp.ClientSession) -> None:
    assert (await post(session, "/start"))[0] == 200
    code, result = await post(session, "/process", JOB)
    assert code == 200
    assert (result["instance_id"], result["trajectory_id"]) == ("i-1", 7)
    assert (result["success"], result["filter"], result["critical_error"], result["error"]) == (True, False, None, None)
    assert (result["resolved"], result["git_patch"], result["tools"]) == (False, None, None)
    user, assistant = result["messages"]
    assert (user["role"], user["token_ids"]) == ("user", None)
    assert assistant == {
        "role": "assistant", "content": "gone", "tool_calls": None,
        "token_ids": [3], "input_ids": [1, 2], "logprobs": [-0.5],
    }  # fmt: skip
    timing = result["timing"]
    assert (timing["counted_elapsed"], timing["others_time"], timing["timeout_triggered"]) == (3.0, 1.5, False)
    sampling = run.service.specs["job-j"].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 100)
    assert await status(session) == (200, {"status": "running", "pending_jobs": 0, "llm_servers": []})
    assert (await post(session, "/stop"))[0] == 200


async def test_before_the_start_there_is_503(session: aiohttp.ClientSession) -> None:
    for code in (
        (await post(session, "/process", JOB))[0],
        (await status(session))[0],
        (await post(session, "/stop"))[0],
    ):
        assert code == 503


async def test_a_second_start_is_400(session: aiohttp.ClientSession) -> None:
    assert [(await post(session, "/start"))[0] for _ in range(2)] == [200, 400]
    assert [(await post(session, "/stop"))[0] for _ in range(2)] == [200, 503]
    assert (await post(session, "/start"))[0] == 200


async def test_addresses_are_buffered_until_the_start(run: FakeRun, session: aiohttp.ClientSession) -> None:
    assert (await post(session, "/add_llm_server", ADDRESS))[0] == 200
    assert list(run.service.servers) == ["s0"]
    await post(session, "/start")
    assert (await status(session))[1]["llm_servers"] == [ADDRESS["address"]]
    await post(session, "/add_llm_server", {"address": "http://gpu2:8000/v1/"})
    await post(session, "/add_llm_server", {"address": "http://gpu2:8000/v1"})  # the same
    assert len(run.service.servers) == 3
    assert (await post(session, "/clear_llm_server"))[0] == 200
    assert list(run.service.servers) == ["s0"]  # the run's own stays


async def test_servers_are_there_again_after_stop_and_start(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    await post(session, "/add_llm_server", ADDRESS)
    await post(session, "/stop")
    assert list(run.service.servers) == ["s0"]
    await post(session, "/start")
    assert len(run.service.servers) == 2


async def test_a_server_that_gives_no_ids_is_told_at_once(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/add_llm_server", {"address": "http://no-ids:8000/v1"})
    assert (await post(session, "/start"))[0] == 422
    assert (await status(session))[0] == 503
    await post(session, "/clear_llm_server")
    assert (await post(session, "/start"))[0] == 200


async def test_without_an_llm_server_there_is_503(run: FakeRun, session: aiohttp.ClientSession) -> None:
    run.service.servers.clear()
    await post(session, "/start")
    code, answer = await post(session, "/process", JOB)
    assert (code, answer["error"]["code"]) == (503, "no_servers")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"instance": {"data_source": "chess"}}, "$.instance.data_source"),
        ({"instance": {"data_source": ["t"]}}, "$.instance.data_source"),
        ({"instance": 3}, "$.instance"),
        ({"sampling_params": {"temperature": -1}}, "$.sampling_params.temperature"),
        ({"sampling_params": {"top_k": 20}}, "$.sampling_params.top_k"),
        ({"sampling_params": {"colour": 1}}, "$.sampling_params.colour"),
        ({"job_id": []}, "$.job_id"),
    ],
)
async def test_bad_jobs_are_400(session: aiohttp.ClientSession, change: dict[str, Any], field: str) -> None:
    await post(session, "/start")
    code, answer = await post(session, "/process", JOB | change)
    assert (code, answer["error"]["details"]["field"]) == (400, field)


async def test_where_a_data_source_leads(tmp_path: Path) -> None:
    service = FakeService(("deepcoder", "swebench"))
    service.add_worker()
    service.add_own_server()
    async with fake_run(tmp_path, service) as run:
        async with aiohttp.ClientSession("http://h", connector=aiohttp.UnixConnector(str(run.socket_path))) as session:
            await post(session, "/start")
            for job_id, source in (("a", {}), ("b", {"data_source": "taco"}), ("c", {"data_source": "deepcoder"})):
                assert (await post(session, "/process", {"instance": source, "job_id": job_id}))[0] == 200
        assert [spec.task for spec in run.service.specs.values()] == ["swebench", "deepcoder", "deepcoder"]


async def test_no_data_source_means_the_runs_own_task(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    assert (await post(session, "/process", {"instance": {}}))[0] == 200


async def test_any_job_id_will_do(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    names = ["a/b", "ü", "x" * 1000, "a b", 5, "", "job-j", "../../etc"]
    for name in names:
        assert (await post(session, "/process", JOB | {"job_id": name}))[0] == 200
    assert len(run.service.specs) == len(names)


async def test_a_client_that_went_away_gets_its_result_later(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    run.service.hold()
    gone = asyncio.create_task(post(session, "/process", JOB))
    await until_job(run, "job-j")
    gone.cancel()
    assert (await status(session))[1]["pending_jobs"] == 1
    again = asyncio.create_task(post(session, "/process", JOB))
    run.service.release()
    code, result = await again
    assert (code, result["success"]) == (200, True)
    assert await post(session, "/process", JOB) == (200, result)
    assert len(run.service.specs) == 1


async def test_a_job_id_means_one_job(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    await post(session, "/process", JOB)
    other = JOB | {"instance": {"data_source": "t", "instance_id": "i-2"}}
    assert (await post(session, "/process", other))[0] == 409


async def test_cancelling(run: FakeRun, session: aiohttp.ClientSession) -> None:
    assert await post(session, "/cancel", {"job_id": "j"}) == (200, {"status": "there is no such job"})
    await post(session, "/start")
    run.service.hold()
    job = asyncio.create_task(post(session, "/process", JOB))
    await until_job(run, "job-j")
    assert await post(session, "/cancel", {"job_id": "j"}) == (200, {"status": "cancelled"})
    code, result = await job
    assert (code, result["success"], result["error"], result["filter"]) == (200, False, "cancelled", True)
    run.service.release()
    await post(session, "/process", JOB | {"job_id": "k"})
    assert await post(session, "/cancel", {"job_id": "k"}) == (200, {"status": "the job is already finished"})


async def test_stop_cancels_the_jobs_and_nothing_else(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await post(session, "/start")
    run.service.hold()
    job = asyncio.create_task(post(session, "/process", JOB))
    await until_job(run, "job-j")
    async with run.client() as client:
        await client.submit_rollouts([RolloutSpec("other", "t", {})])
        await post(session, "/stop")
        assert (await job)[1]["error"] == "cancelled"
        assert (await client.get_rollout("other")).status is Status.RUN


async def test_at_the_time_limit_the_job_is_ended(tmp_path: Path) -> None:
    async with fake_run(tmp_path, own_task="t", process_timeout_s=-4.99) as run:  # 2 × this + 10 s is 0.02 s
        run.service.hold()
        async with aiohttp.ClientSession("http://h", connector=aiohttp.UnixConnector(str(run.socket_path))) as session:
            await post(session, "/start")
            code, answer = await post(session, "/process", JOB)
            assert (code, answer["error"]["code"]) == (504, "time_limit")
            assert (await status(session))[1]["pending_jobs"] == 0
        assert (await run.service.rollout_progress("job-j")).status is Status.CANCELLED


async def test_a_service_started_anew_goes_on(tmp_path: Path) -> None:
    """The HTTP face ends, the orders stay, as they do in the journal."""
    service = FakeService()
    service.add_worker()
    service.add_own_server()
    service.hold()
    unix = aiohttp.UnixConnector(str(tmp_path / "f.http"))
    async with aiohttp.ClientSession("http://h", connector=unix) as session:
        async with fake_run(tmp_path, service, own_task="t") as run:
            await post(session, "/start")
            await post(session, "/add_llm_server", ADDRESS)
            job = asyncio.create_task(post(session, "/process", JOB))
            await until_job(run, "job-j")
            job.cancel()
        service.closed = False
        async with fake_run(tmp_path, service, own_task="t"):
            assert (await status(session))[1] == {
                "status": "running", "pending_jobs": 1, "llm_servers": [ADDRESS["address"]],
            }  # fmt: skip
            service.release()
            code, result = await post(session, "/process", JOB)
            assert (code, result["success"]) == (200, True)


async def test_control_answers_belong_to_their_calls(run: FakeRun, session: aiohttp.ClientSession) -> None:
    """A control call that its client gave up leaves the next ones right."""
    await post(session, "/start")
    entered, may_go_on = asyncio.Event(), asyncio.Event()
    pass_on = run.service.add_server

    async def slow(server: Any) -> Any:
        entered.set()
        await may_go_on.wait()
        return await pass_on(server)

    run.service.add_server = slow  # type: ignore[method-assign]
    given_up = asyncio.create_task(post(session, "/add_llm_server", ADDRESS))
    await entered.wait()
    given_up.cancel()
    may_go_on.set()
    for _ in range(3):
        assert (await status(session))[1]["status"] == "running"
    assert (await post(session, "/clear_llm_server"))[1] == {"status": "cleared"}
