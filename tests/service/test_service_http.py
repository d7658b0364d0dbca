"""What the HTTP API refuses, and how it says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from fake_run import FakeRun, fake_run
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message

from prorl_hpc.messages.batch import BatchSpec
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.service.app import make_app
from prorl_hpc.service.bearer_token import BearerToken


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FakeRun]:
    async with fake_run(tmp_path) as made:
        yield made


@pytest.fixture
async def session(run: FakeRun) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(run.socket_path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as made:
        yield made


async def ask(session: aiohttp.ClientSession, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    async with session.request(method, path, **more) as response:
        return response.status, await response.json()


BATCH: dict[str, Any] = {
    "batch_id": "b",
    "task": "t",
    "rows": [{"id": "r0"}, {"id": "r1"}],
    "groups_wanted": 1,
    "group_size": 2,
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_id": "../b"}, "$.batch_id"),
        ({"batch_id": ""}, "$.batch_id"),
        ({"batch_id": "b#2"}, "$.batch_id"),
        ({"group_size": 0}, "$.group_size"),
        ({"group_size": 1}, "$.group_size"),
        ({"group_size": "2"}, "$.group_size"),
        ({"group_size": 2.5}, "$.group_size"),
        ({"groups_wanted": 0}, "$.groups_wanted"),
        ({"groups_wanted": 3}, "$.rows"),
        ({"rows": [1]}, "$.rows[0]"),
        ({"filter": "most"}, "$.filter"),
        ({"priority": 101}, "$.priority"),
        ({"max_parallel_groups": -1}, "$.max_parallel_groups"),
        ({"min_usable_samples": 0}, "$.min_usable_samples"),
        ({"sampling": {"top_p": 0}}, "$.sampling.top_p"),
        ({"sampling": {"max_tokens": 0}}, "$.sampling.max_tokens"),
        ({"sampling": {"top_k": 3}}, "$.sampling.top_k"),
        ({"budgets": {"run_s": -1}}, "$.budgets.run_s"),
        ({"colour": "red"}, "$.colour"),
        ({"task": None}, "$.task"),
    ],
)
async def test_a_bad_order_is_refused_by_field(
    session: aiohttp.ClientSession, change: dict[str, Any], field: str
) -> None:
    status, answer = await ask(session, "POST", "/v1/batches", json=BATCH | change)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert answer["error"]["details"]["field"] == field
    assert set(answer["error"]) == {"code", "message", "details"}
    assert (await ask(session, "GET", "/v1/batches/b"))[0] == 404  # nothing half accepted


async def test_a_missing_field_is_named(session: aiohttp.ClientSession) -> None:
    status, answer = await ask(session, "POST", "/v1/batches", json={"batch_id": "b"})
    assert (status, answer["error"]["details"]["field"]) == (400, "$.task")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b"[]", b"null"])
async def test_bodies_that_are_no_order(session: aiohttp.ClientSession, body: bytes) -> None:
    status, answer = await ask(session, "POST", "/v1/batches", data=body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "$"),
        ([{"rollout_id": "a", "task": "t", "row": {}}] * 2, "$[1].rollout_id"),
        ([{"rollout_id": "a", "task": "", "row": {}}], "$[0].task"),
        ([{"rollout_id": "a", "task": "t", "row": {}, "x": 1}], "$[0].x"),
        ({"rollout_id": "a"}, "$"),
    ],
)
async def test_bad_rollouts_are_refused_together(session: aiohttp.ClientSession, body: Any, field: str) -> None:
    status, answer = await ask(session, "POST", "/v1/rollouts", json=body)
    assert (status, answer["error"]["details"]["field"]) == (400, field)
    assert (await ask(session, "GET", "/v1/rollouts/a"))[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"version": 0, "paths": ["/w"]}, "$.version"),
        ({"version": 1, "paths": []}, "$.paths"),
        ({"version": 1, "paths": ["/w"], "probe": {"token_ids": [1, 2], "logprobs": [], "tolerance": 1}}, "$.probe.logprobs"),
        ({"version": 1, "paths": ["/w"], "probe": {"colour": 1}}, "$.probe.colour"),
    ],
)  # fmt: skip
async def test_bad_weight_updates(session: aiohttp.ClientSession, body: Any, field: str) -> None:
    status, answer = await ask(session, "POST", "/v1/weights", json=body)
    assert (status, answer["error"]["details"]["field"]) == (400, field)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PATCH", "/v1/batches", 405, "method_not_allowed"),
        ("HEAD", "/v1/results", 405, None),
        ("GET", "/v1/batches/", 404, "no_such_path"),
        ("GET", "/v1/batches?after=nope", 404, "unknown_batch"),
        ("GET", "/v1/rollouts?after=nope", 404, "unknown_rollout"),
        ("PUT", "/v1/workers/nope/drain", 404, "unknown_worker"),
        ("PUT", "/v1/servers/nope/drain", 404, "unknown_server"),
        ("DELETE", "/v1/servers/nope", 404, "unknown_server"),
        ("DELETE", "/v1/servers/s0", 409, "own_server"),
        ("PUT", "/v1/batches/b", 405, "method_not_allowed"),
        ("POST", "/v1/status", 405, "method_not_allowed"),
        ("GET", "/v2/status", 404, "no_such_path"),
        ("GET", "/v1/batches/nope", 404, "unknown_batch"),
        ("GET", "/v1/batches/nope/result", 404, "unknown_batch"),
        ("DELETE", "/v1/batches/nope", 404, "unknown_batch"),
        ("DELETE", "/v1/rollouts/nope", 404, "unknown_rollout"),
        ("GET", "/v1/rollouts/nope/result", 404, "unknown_rollout"),
    ],
)
async def test_wrong_paths_and_methods(
    session: aiohttp.ClientSession, method: str, path: str, status: int, code: str | None
) -> None:
    async with session.request(method, path) as response:
        got = response.status
        answer = await response.json() if code else None
    assert (got, answer and answer["error"]["code"]) == (status, code)


async def test_405_names_all_methods_of_the_path(session: aiohttp.ClientSession) -> None:
    async with session.patch("/v1/batches/b") as response:
        assert {"GET", "DELETE"} <= set(response.headers["Allow"].split(", "))


@pytest.mark.parametrize("wait_s", ["-1", "61", "soon", "nan", "inf"])
async def test_wait_s_out_of_range(session: aiohttp.ClientSession, wait_s: str) -> None:
    await ask(session, "POST", "/v1/batches", json=BATCH)
    status, answer = await ask(session, "GET", f"/v1/batches/b/result?wait_s={wait_s}")
    assert (status, answer["error"]["details"]["field"]) == (400, "wait_s")


async def test_a_running_batch_is_202(run: FakeRun, session: aiohttp.ClientSession) -> None:
    run.service.held = True
    assert (await ask(session, "POST", "/v1/batches", json=BATCH))[0] == 200
    status, answer = await ask(session, "GET", "/v1/batches/b/result?wait_s=0.05")
    assert (status, answer["state"], answer["in_flight"]) == (202, "running", 1)


@pytest.mark.parametrize(
    "header",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic TOKEN"}, {"Authorization": "Bearer"},
     {"Authorization": "TOKEN"}, {"Authorization": "Bearer ÿ"}],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/status", "/v1/batches/b", "/openapi.json", "/nothing"])
async def test_tcp_without_the_token_is_401(run: FakeRun, header: dict[str, str], path: str) -> None:
    headers = {name: value.replace("TOKEN", run.token) for name, value in header.items()}
    async with aiohttp.ClientSession(run.face.url) as session, session.get(path, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await response.json())["error"]["code"] == "unauthorized"


async def test_healthz_is_open_and_says_nothing_else(run: FakeRun) -> None:
    async with aiohttp.ClientSession(run.face.url) as session, session.get("/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_workers_and_servers_are_listed(run: FakeRun, session: aiohttp.ClientSession) -> None:
    assert [w["worker_id"] for w in (await ask(session, "GET", "/v1/workers"))[1]] == ["w0"]  # type: ignore[index]
    assert [s["server_id"] for s in (await ask(session, "GET", "/v1/servers"))[1]] == ["s0"]  # type: ignore[index]


async def test_the_openapi_document_has_every_path_and_resolves(session: aiohttp.ClientSession) -> None:
    status, document = await ask(session, "GET", "/openapi.json")
    assert status == 200
    app = make_app(None)  # type: ignore[arg-type]
    served = {(r.path, m.lower()) for r in app.routes for m in r.methods - {"HEAD"}}  # type: ignore[attr-defined]
    told = {(path, method) for path, calls in document["paths"].items() for method in calls}
    assert served - {("/openapi.json", "get")} == told
    schemas = document["components"]["schemas"]
    refs = {part.split('"')[0] for part in msgspec.json.encode(document).decode().split("#/components/schemas/")[1:]}
    assert refs <= set(schemas) and "BatchSpec" in refs


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=1.5", "limit"), ("limit=", "limit"), ("limit=1_0", "limit"),
     ("limit=1&limit=2", "limit"), ("colour=red", "colour"), ("status=asleep", "status"), ("after=" + "x" * 300, "after")],
)  # fmt: skip
async def test_bad_query_parameters(session: aiohttp.ClientSession, query: str, field: str) -> None:
    status, answer = await ask(session, "GET", f"/v1/rollouts?{query}")
    assert (status, answer["error"]["details"]["field"]) == (400, field)


async def test_calls_without_parameters_refuse_any(session: aiohttp.ClientSession) -> None:
    assert (await ask(session, "GET", "/v1/status?verbose=true"))[0] == 400
    assert (await ask(session, "GET", "/v1/results?follow=yes"))[0] == 400


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/rollouts"])
async def test_an_unknown_task_names_the_known_ones(session: aiohttp.ClientSession, path: str) -> None:
    spec = {"rollout_id": "a", "task": "chess", "row": {}}
    status, answer = await ask(session, "POST", path, json=[spec] if "rollouts" in path else BATCH | {"task": "chess"})
    assert (status, answer["error"]["code"]) == (400, "unknown_task")
    assert answer["error"]["details"]["known"] == ["t"]


async def test_lists_come_in_pages(session: aiohttp.ClientSession) -> None:
    for i in range(3):
        await ask(session, "POST", "/v1/batches", json=BATCH | {"batch_id": f"b{i}"})
    _, first = await ask(session, "GET", "/v1/batches?limit=2")
    _, second = await ask(session, "GET", "/v1/batches?limit=2&after=b1")
    assert [b["batch_id"] for b in [*first, *second]] == ["b0", "b1", "b2"]  # type: ignore[index]
    _, rollouts = await ask(session, "GET", "/v1/rollouts?status=done&batch_id=b1")
    assert [r["rollout_id"] for r in rollouts] == ["b1.g0.s0", "b1.g0.s1"]  # type: ignore[index]
    assert (await ask(session, "GET", "/v1/rollouts?status=run"))[1] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [({"url": "ftp://h/v1"}, "$.url"), ({"url": "http://h:99999/v1"}, "$.url"), ({"url": "http://user:secret@h/v1"}, "$.url"),
     ({"url": "http://h/v1?key=1"}, "$.url"), ({"server_id": "a b"}, "$.server_id"), ({"api_key": "two\nlines"}, "$.api_key"),
     ({"weight_version": -1}, "$.weight_version"), ({"port": 1}, "$.port")],
)  # fmt: skip
async def test_bad_outside_servers(session: aiohttp.ClientSession, change: dict[str, Any], field: str) -> None:
    body = {"server_id": "o", "url": "http://h:8000/v1", "api_key": "sesame"} | change
    status, answer = await ask(session, "POST", "/v1/servers", json=body)
    assert (status, answer["error"]["details"]["field"]) == (400, field)
    assert "two" not in str(answer) and "sesame" not in str(answer)


async def test_a_model_behind_the_url_is_pointed_to_its_field(session: aiohttp.ClientSession) -> None:
    for url in ("http://h:8000#smollm", "http://h:8000/v1#smollm", "unix:/run/llm.sock#smollm"):
        status, answer = await ask(session, "POST", "/v1/servers", json={"server_id": "o", "url": url})
        assert (status, answer["error"]["details"]["field"]) == (400, "$.url")
        assert "the field model" in answer["error"]["message"]


async def test_api_keys_never_come_back(session: aiohttp.ClientSession) -> None:
    body = {"server_id": "o", "url": "http://h:8000/v1", "api_key": "sesame"}
    answers = [await ask(session, "POST", "/v1/servers", json=body) for _ in range(2)]
    answers.append(await ask(session, "POST", "/v1/servers", json=body | {"api_key": "sesame2"}))
    answers += [await ask(session, "GET", path) for path in ("/v1/servers", "/v1/status")]
    assert [status for status, _ in answers] == [200, 200, 409, 200, 200]
    assert "sesame" not in str(answers)
    assert await ask(session, "DELETE", "/v1/servers/o") == (200, {"server_id": "o"})


async def test_a_server_that_will_not_do_is_422(session: aiohttp.ClientSession) -> None:
    body = {"server_id": "o", "url": "http://no-ids:8000/v1"}
    assert (await ask(session, "POST", "/v1/servers", json=body))[0] == 422


async def test_pause_drain_and_policies(session: aiohttp.ClientSession) -> None:
    assert (await ask(session, "POST", "/v1/pause"))[1]["paused"] is True
    assert (await ask(session, "POST", "/v1/resume"))[1]["paused"] is False
    for kind, name in (("workers", "w0"), ("servers", "s0")):
        assert (await ask(session, "PUT", f"/v1/{kind}/{name}/drain"))[1]["draining"] is True
        assert (await ask(session, "DELETE", f"/v1/{kind}/{name}/drain"))[1]["draining"] is False
    assert (await ask(session, "GET", "/v1/policies"))[1][0]["policy"] == "policy"  # type: ignore[index]


async def test_retry_after_comes_with_what_may_pass(run: FakeRun, session: aiohttp.ClientSession) -> None:
    for code, status, waits in (("queue_full", 429, True), ("no_workers", 503, True), ("shutting_down", 503, False)):
        run.service.refuse = ServiceError("later", code=code, status=status)
        async with session.post("/v1/batches", json=BATCH) as response:
            assert (response.status, "Retry-After" in response.headers) == (status, waits)


async def test_metrics_of_the_run_and_of_the_face(run: FakeRun, session: aiohttp.ClientSession) -> None:
    await ask(session, "POST", "/v1/batches", json=BATCH)
    await ask(session, "GET", "/v1/batches/nope")
    async with aiohttp.ClientSession(run.face.url) as stranger, stranger.get("/metrics") as response:
        assert response.status == 401
    async with session.get("/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["prorl_rollouts_accepted_total",] == 2
    assert found["prorl_http_answers_total", "/v1/batches/{id}", "404", "GET"] == 1
    assert found["prorl_http_refusals_total", "unknown_batch"] == 1
    assert found["prorl_http_refusals_total", "unauthorized"] == 1


async def test_any_content_type_is_read_as_json(session: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    status, _ = await ask(session, "POST", "/v1/batches", data=msgspec.json.encode(BATCH), headers=headers)
    assert status == 200


async def test_a_body_that_stops_is_408(tmp_path: Path) -> None:
    async with fake_run(tmp_path, body_stall_s=0.05) as run:
        reader, writer = await asyncio.open_unix_connection(str(run.socket_path))
        writer.write(b'POST /v1/batches HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"batch_id":')
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end: the service hangs up
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        writer.close()


async def test_a_row_beyond_msgpack_is_refused(session: aiohttp.ClientSession) -> None:
    status, answer = await ask(session, "POST", "/v1/batches", json=BATCH | {"rows": [{"n": 2**70}]})
    assert (status, answer["error"]["details"]["field"]) == (400, "$.rows")


def test_the_documentation_names_every_call() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    for call in make_app(None).state.calls:  # type: ignore[arg-type]
        literal = call.path.split("{id}")[0].rstrip("/")
        assert literal in text, call


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, Any, BaseException | None]:
    """Status, answer, and what the app raised after it had answered."""
    sent: list[Message] = []
    raised: BaseException | None = None

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "server": ("x", 1)}
    try:
        await app(scope, receive, send)
    except Exception as error:
        raised = error
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"]), raised


async def test_a_body_over_the_limit_is_413() -> None:
    app = make_app(None, max_body_bytes=1000)  # type: ignore[arg-type]
    status, answer, raised = await post(app, "/v1/batches", b" " * 1001)
    assert (status, answer["error"]["code"], raised) == (413, "body_too_large", None)


async def test_a_fault_of_the_service_is_500_in_the_same_shape() -> None:
    class Broken:
        tasks = ("t",)
        policies = ("policy",)

        async def submit_batch(self, spec: BatchSpec) -> None:
            raise KeyError("secret")

    app = make_app(Broken())  # type: ignore[arg-type]
    status, answer, raised = await post(app, "/v1/batches", msgspec.json.encode(BATCH))
    assert (status, answer["error"]["code"]) == (500, "internal")
    assert "secret" not in str(answer)
    assert isinstance(raised, KeyError)  # for the log


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="empty token"):
        BearerToken(make_app(None), "")  # type: ignore[arg-type]


async def test_a_row_that_no_message_to_a_worker_could_hold(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_hpc.service.limits.MAX_ROW_BYTES", 100)
    good = {"rollout_id": "good", "task": "t", "row": {"id": "r0"}}
    large = {"rollout_id": "large", "task": "t", "row": {"x": [0.5] * 12}}
    status, answer = await ask(session, "POST", "/v1/rollouts", json=[good, large])
    assert status == 400 and answer["error"]["details"] == {"field": "$[1].row"}
    assert "expected at most 100" in answer["error"]["message"]
    assert await ask(session, "GET", "/v1/rollouts") == (200, [])


async def test_a_client_that_goes_away_within_its_body_is_no_fault(
    run: FakeRun, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_unix_connection(str(run.socket_path))
    writer.write(b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n[{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(10):
        while True:
            async with session.get("/metrics") as response:
                if 'prorl_http_refusals_total{code="client_gone"} 1.0' in await response.text():
                    break
    assert not caplog.records
