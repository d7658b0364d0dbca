"""The HTTP API as a Starlette app: routes from the calls of each family, errors of one shape.

Everything is JSON, but the stream of results (a line of JSON each) and the Prometheus text. A call that is refused is
answered ``{"error": {"code", "message", "details"}}``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.service.batch_calls import batch_calls
from prorl_hpc.service.calls import NDJSON, Asked, Bodies, Call, json_answer
from prorl_hpc.service.errors import Refusal, answer_of
from prorl_hpc.service.http_metrics import HttpMetrics
from prorl_hpc.service.openapi import openapi_document
from prorl_hpc.service.parameters import Query
from prorl_hpc.service.prorl_calls import ProrlAgentFace
from prorl_hpc.service.protocol import RolloutService
from prorl_hpc.service.result_stream import KEEP_ALIVE_S, result_calls
from prorl_hpc.service.rollout_calls import rollout_calls
from prorl_hpc.service.run_calls import run_calls

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
BODY_STALL_S = 30.0
PROCESS_TIMEOUT_S = 400.0
_RETRY_AFTER_S = "2"


def make_app(
    service: RolloutService,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_stall_s: float = BODY_STALL_S,
    keep_alive_s: float = KEEP_ALIVE_S,
    process_timeout_s: float = PROCESS_TIMEOUT_S,
    own_task: str = "",
) -> Starlette:
    """The app without authentication: the Unix socket's mode, or BearerToken around it, sees to that.
    ``process_timeout_s``: /process ends a job after 2 × this + 10 seconds. ``own_task``: the run's, which a job of
    /process means that names none."""
    http = HttpMetrics()
    calls = [
        *batch_calls(service),
        *rollout_calls(service),
        *result_calls(service, keep_alive_s),
        *run_calls(service, http),
        *ProrlAgentFace(service, process_timeout_s, own_task).calls(),
    ]
    document = openapi_document(calls)

    async def openapi(asked: Asked) -> Response:
        return json_answer(document)

    calls.append(Call("GET", "/openapi.json", "This document", openapi, dict[str, Any]))
    bodies = Bodies(max_body_bytes, body_stall_s)
    refusing = _Refusing(http)
    handlers: dict[Any, Any] = {
        ServiceError: refusing.refused,
        HTTPException: refusing.http_error,
        RunError: refusing.failing,
        Exception: refusing.broken,
    }
    app = Starlette(routes=_routes(calls, bodies, http), exception_handlers=handlers)
    # A call that is written with a slash too much is an unknown path, not a redirect that loses its body.
    app.router.redirect_slashes = False
    app.state.http_metrics = http
    app.state.calls = calls
    return app


def _routes(calls: list[Call], bodies: Bodies, http: HttpMetrics) -> list[Route]:
    """One route a path, so that 405 names all methods of the path."""
    by_path: dict[str, dict[str, Call]] = defaultdict(dict)
    for call in calls:
        by_path[call.path][call.method] = call
    routes = []
    for path, methods in by_path.items():
        route = Route(path, _endpoint(methods, bodies, http), methods=list(methods))
        if any(call.media_type == NDJSON for call in methods.values()) and route.methods:
            route.methods.discard("HEAD")  # the head of an endless stream would never end
        routes.append(route)
    return routes


def _endpoint(methods: dict[str, Call], bodies: Bodies, http: HttpMetrics) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        call = methods["GET" if request.method == "HEAD" else request.method]
        status = 500
        try:
            response = await _answer(call, request, bodies)
            status = response.status_code
        except ServiceError as error:
            status = error.status
            raise
        finally:
            http.answered(call.method, call.path, status)
        return response

    return endpoint


async def _answer(call: Call, request: Request, bodies: Bodies) -> Response:
    query = Query(request.query_params, call.params)
    body = None if call.body is None else await bodies.read(request, call.body)
    value = await call.run(Asked(request.path_params.get("id", ""), query, body))
    if isinstance(value, Response):
        return value
    pending = call.pending is not None and isinstance(value, call.pending)
    return json_answer(value, 202 if pending else 200)


class _Refusing:
    """Makes errors answers, and counts them."""

    def __init__(self, http: HttpMetrics) -> None:
        self._http = http

    async def refused(self, request: Request, error: ServiceError) -> Response:
        return self._refuse(error)

    async def http_error(self, request: Request, error: HTTPException) -> Response:
        codes = {404: "no_such_path", 405: "method_not_allowed"}
        refusal = Refusal(
            f"{request.method} {request.url.path[:256]}: {error.detail}",
            code=codes.get(error.status_code, "http_error"),
            status=error.status_code,
        )
        return self._refuse(refusal, dict(error.headers or {}))

    async def failing(self, request: Request, error: RunError) -> Response:
        """The service cannot go on, and is about to be started anew: asking again is right."""
        return self._refuse(Refusal(f"the service fails: {error}", code="failing", status=503))

    async def broken(self, request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and uvicorn logs it.
        return self._refuse(Refusal(f"{type(error).__name__} in the service: see its log", code="internal", status=500))

    def _refuse(self, error: ServiceError, headers: dict[str, str] | None = None) -> Response:
        self._http.refused(error.code)
        headers = dict(headers or {})
        # A service that ends will not be there in a moment, nor will the run.
        if error.status in (429, 503) and error.code not in ("shutting_down", "not_started"):
            headers["Retry-After"] = _RETRY_AFTER_S
        if error.status in (408, 413):
            headers["Connection"] = "close"
        return json_answer(answer_of(error), error.status, headers)
