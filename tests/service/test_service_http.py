"""What the HTTP API refuses, and how it says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from service_run import ServiceRun, service_run
from starlette.types import ASGIApp, Message

from prorl_hpc.messages.batch import BatchSpec
from prorl_hpc.service.app import make_app
from prorl_hpc.service.bearer_token import BearerToken


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[ServiceRun]:
    async with service_run(tmp_path) as made:
        yield made


@pytest.fixture
async def session(run: ServiceRun) -> AsyncIterator[aiohttp.ClientSession]:
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
        ("GET", "/v1/batches", 405, "method_not_allowed"),
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
    session: aiohttp.ClientSession, method: str, path: str, status: int, code: str
) -> None:
    got, answer = await ask(session, method, path)
    assert (got, answer["error"]["code"]) == (status, code)


@pytest.mark.parametrize("wait_s", ["-1", "61", "soon", "nan", "inf"])
async def test_wait_s_out_of_range(session: aiohttp.ClientSession, wait_s: str) -> None:
    await ask(session, "POST", "/v1/batches", json=BATCH)
    status, answer = await ask(session, "GET", f"/v1/batches/b/result?wait_s={wait_s}")
    assert (status, answer["error"]["details"]["field"]) == (400, "wait_s")


async def test_a_running_batch_is_202(session: aiohttp.ClientSession) -> None:
    assert (await ask(session, "POST", "/v1/batches", json=BATCH))[0] == 200
    status, answer = await ask(session, "GET", "/v1/batches/b/result?wait_s=0.05")
    assert (status, answer["state"], answer["in_flight"]) == (202, "running", 1)


@pytest.mark.parametrize(
    "header",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic TOKEN"}, {"Authorization": "Bearer"},
     {"Authorization": "TOKEN"}, {"Authorization": "Bearer ÿ"}],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/status", "/v1/batches/b", "/openapi.json", "/nothing"])
async def test_tcp_without_the_token_is_401(run: ServiceRun, header: dict[str, str], path: str) -> None:
    headers = {name: value.replace("TOKEN", run.keys.api_token) for name, value in header.items()}
    async with aiohttp.ClientSession(run.face.url) as session, session.get(path, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await response.json())["error"]["code"] == "unauthorized"


async def test_healthz_is_open_and_says_nothing_else(run: ServiceRun) -> None:
    async with aiohttp.ClientSession(run.face.url) as session, session.get("/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_workers_and_servers_are_listed(run: ServiceRun, session: aiohttp.ClientSession) -> None:
    await run.worker()
    await run.server()
    assert [w["worker_id"] for w in (await ask(session, "GET", "/v1/workers"))[1]] == ["w0"]  # type: ignore[index]
    assert [s["server_id"] for s in (await ask(session, "GET", "/v1/servers"))[1]] == ["s0"]  # type: ignore[index]


async def test_the_openapi_document_has_every_path_and_resolves(session: aiohttp.ClientSession) -> None:
    status, document = await ask(session, "GET", "/openapi.json")
    assert status == 200
    app = make_app(None)  # type: ignore[arg-type]
    served = {(r.path, m.lower()) for r in app.routes for m in r.methods - {"HEAD"}}  # type: ignore[attr-defined]
    told = {(path, m) for path, calls in document["paths"].items() for m in calls if m in ("get", "post", "delete")}
    assert served - {("/openapi.json", "get")} == told
    schemas = document["components"]["schemas"]
    refs = {part.split('"')[0] for part in msgspec.json.encode(document).decode().split("#/components/schemas/")[1:]}
    assert refs <= set(schemas) and "BatchSpec" in refs


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
        def submit_batch(self, spec: BatchSpec) -> None:
            raise KeyError("secret")

    app = make_app(Broken())  # type: ignore[arg-type]
    status, answer, raised = await post(app, "/v1/batches", msgspec.json.encode(BATCH))
    assert (status, answer["error"]["code"]) == (500, "internal")
    assert "secret" not in str(answer)
    assert isinstance(raised, KeyError)  # for the log


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="empty token"):
        BearerToken(make_app(None), "")  # type: ignore[arg-type]
