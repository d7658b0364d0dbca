"""The HTTP API as a Starlette app: routes, bodies in and out, errors of one shape.

Everything is JSON. A call that is refused is answered ``{"error": {"code", "message", "details"}}``.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prorl_hpc.messages.batch import BatchProgress, BatchSpec
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import RolloutProgress, RolloutSpec
from prorl_hpc.service.decoding import decode_body
from prorl_hpc.service.errors import Refusal, answer_of, invalid
from prorl_hpc.service.limits import check_batch, check_rollouts, check_weights
from prorl_hpc.service.openapi import openapi_document
from prorl_hpc.service.protocol import RolloutService

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_WAIT_S = 60.0
_RETRY_AFTER_S = {429: "2", 503: "2"}
_encoder = msgspec.json.Encoder()


def make_app(service: RolloutService, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The app without authentication: the Unix socket's mode, or BearerToken around it, sees to that."""
    api = _Api(service, max_body_bytes)
    routes = [
        Route("/healthz", api.healthz, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        Route("/v1/status", api.status, methods=["GET"]),
        Route("/v1/workers", api.workers, methods=["GET"]),
        Route("/v1/servers", api.servers, methods=["GET"]),
        Route("/v1/weights", api.weights, methods=["POST"]),
        Route("/v1/batches", api.submit_batch, methods=["POST"]),
        Route("/v1/batches/{id}", api.batch, methods=["GET"]),
        Route("/v1/batches/{id}", api.cancel_batch, methods=["DELETE"]),
        Route("/v1/batches/{id}/result", api.batch_result, methods=["GET"]),
        Route("/v1/rollouts", api.submit_rollouts, methods=["POST"]),
        Route("/v1/rollouts/{id}", api.rollout, methods=["GET"]),
        Route("/v1/rollouts/{id}", api.cancel_rollout, methods=["DELETE"]),
        Route("/v1/rollouts/{id}/result", api.rollout_result, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {ServiceError: _refused, HTTPException: _http_error, Exception: _broken}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Api:
    """One method per route."""

    def __init__(self, service: RolloutService, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return _json(openapi_document())

    async def status(self, request: Request) -> Response:
        return _json(self._service.status())

    async def workers(self, request: Request) -> Response:
        return _json(self._service.status().workers)

    async def servers(self, request: Request) -> Response:
        return _json(self._service.status().servers)

    async def weights(self, request: Request) -> Response:
        update: WeightUpdate = await self._body(request, WeightUpdate)
        check_weights(update)
        return _json(await self._service.update_weights(update))

    async def submit_batch(self, request: Request) -> Response:
        spec: BatchSpec = await self._body(request, BatchSpec)
        check_batch(spec)
        return _json(self._service.submit_batch(spec))

    async def batch(self, request: Request) -> Response:
        return _json(self._service.batch_progress(request.path_params["id"]))

    async def batch_result(self, request: Request) -> Response:
        answer = await self._service.wait_batch(request.path_params["id"], _wait_s(request))
        return _json(answer, 202 if isinstance(answer, BatchProgress) else 200)

    async def cancel_batch(self, request: Request) -> Response:
        return _json(self._service.cancel_batch(request.path_params["id"]))

    async def submit_rollouts(self, request: Request) -> Response:
        specs: list[RolloutSpec] = await self._body(request, list[RolloutSpec])
        check_rollouts(specs)
        return _json(self._service.submit_rollouts(specs))

    async def rollout(self, request: Request) -> Response:
        return _json(self._service.rollout_progress(request.path_params["id"]))

    async def rollout_result(self, request: Request) -> Response:
        answer = await self._service.wait_rollout(request.path_params["id"], _wait_s(request))
        return _json(answer, 202 if isinstance(answer, RolloutProgress) else 200)

    async def cancel_rollout(self, request: Request) -> Response:
        return _json(self._service.cancel_rollout(request.path_params["id"]))

    async def _body(self, request: Request, type_: Any) -> Any:
        """The body as ``type_``, never held beyond the limit."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                message = f"the body is larger than {self._max_body_bytes} bytes: send fewer rows at a time"
                raise Refusal(message, code="body_too_large", status=413)
        return decode_body(bytes(body), type_)


def _wait_s(request: Request) -> float:
    given = request.query_params.get("wait_s", "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise invalid(f"wait_s is {given!r}: expected 0 to {MAX_WAIT_S:g} seconds", "wait_s")
    return seconds


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def _refuse(error: ServiceError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status in _RETRY_AFTER_S:
        headers["Retry-After"] = _RETRY_AFTER_S[error.status]
    return _json(answer_of(error), error.status, headers)


async def _refused(request: Request, error: ServiceError) -> Response:
    return _refuse(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    codes = {404: "no_such_path", 405: "method_not_allowed"}
    refusal = Refusal(
        f"{request.method} {request.url.path}: {error.detail}",
        code=codes.get(error.status_code, "http_error"),
        status=error.status_code,
    )
    return _refuse(refusal, dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, and uvicorn logs it.
    return _refuse(Refusal(f"{type(error).__name__} in the service: see its log", code="internal", status=500))
