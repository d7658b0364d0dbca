"""The run itself: workers, LLM servers, policies and their weights, pausing, what a person or a monitor asks for."""

from __future__ import annotations

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.status import PolicyStatus, RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.service.calls import PROMETHEUS, Asked, Call
from prorl_hpc.service.errors import invalid
from prorl_hpc.service.http_metrics import HttpMetrics
from prorl_hpc.service.limits import check_policy, check_server, check_weights
from prorl_hpc.service.parameters import FOR_S, HOLDER
from prorl_hpc.service.protocol import RolloutService


class Removed(msgspec.Struct, frozen=True):
    """The server is not of this run any more."""

    server_id: str


class Health(msgspec.Struct, frozen=True):
    status: str = "ok"


def run_calls(service: RolloutService, http: HttpMetrics) -> list[Call]:
    async def status(asked: Asked) -> RunStatus:
        return service.status()

    async def pause(asked: Asked) -> RunStatus:
        holder, for_s = asked.query.get(HOLDER), asked.query.get(FOR_S)
        if bool(holder) != bool(for_s):
            raise invalid("a pause for a while needs both holder and for_s; one that lasts needs neither", "for_s")
        return await (service.pause_for(holder, for_s) if holder else service.pause(True))

    async def resume(asked: Asked) -> RunStatus:
        holder = asked.query.get(HOLDER)
        return await (service.pause_for(holder, 0.0) if holder else service.pause(False))

    async def policies(asked: Asked) -> list[PolicyStatus]:
        return service.status().policies

    async def weights(asked: Asked) -> list[WeightUpdated]:
        update: WeightUpdate = asked.body
        check_weights(update)
        check_policy(update.policy, service.policies, "$.policy")
        return await service.update_weights(update)

    async def metrics(asked: Asked) -> Response:
        return Response(service.metrics() + http.render(), media_type=CONTENT_TYPE_LATEST)

    async def health(asked: Asked) -> Health:
        return Health()

    return [
        Call("GET", "/healthz", "The service is there", health, Health, open=True),
        Call("GET", "/metrics", "Figures for Prometheus", metrics, str, media_type=PROMETHEUS),
        Call("GET", "/v1/status", "The whole run", status, RunStatus),
        Call(
            "POST", "/v1/pause", "Start no rollout until resumed, or for a while", pause, RunStatus,
            params=(HOLDER, FOR_S), refusals=(503,),
        ),
        Call(
            "POST", "/v1/resume", "End the lasting pause, or that of one holder", resume, RunStatus,
            params=(HOLDER,), refusals=(503,),
        ),
        Call("GET", "/v1/policies", "Policies and their weights", policies, list[PolicyStatus]),
        Call(
            "POST", "/v1/weights", "New weights to every LLM server of a policy", weights, list[WeightUpdated], WeightUpdate,
            refusals=(409, 503),
        ),
        *_worker_calls(service),
        *_server_calls(service),
    ]  # fmt: skip


def _worker_calls(service: RolloutService) -> list[Call]:
    async def workers(asked: Asked) -> list[WorkerStatus]:
        return service.status().workers

    async def drain(asked: Asked) -> WorkerStatus:
        return await service.drain_worker(asked.id, True)

    async def undrain(asked: Asked) -> WorkerStatus:
        return await service.drain_worker(asked.id, False)

    path = "/v1/workers/{id}/drain"
    return [
        Call("GET", "/v1/workers", "Workers and their pools", workers, list[WorkerStatus]),
        Call("PUT", path, "Give a worker no new rollouts", drain, WorkerStatus, refusals=(404,)),
        Call("DELETE", path, "Give a worker rollouts again", undrain, WorkerStatus, refusals=(404,)),
    ]


def _server_calls(service: RolloutService) -> list[Call]:
    async def servers(asked: Asked) -> list[ServerStatus]:
        return service.status().servers

    async def add(asked: Asked) -> ServerStatus:
        server: OutsideServer = asked.body
        check_server(server)
        check_policy(server.policy, service.policies, "$.policy")
        return await service.add_server(server)

    async def remove(asked: Asked) -> Removed:
        await service.remove_server(asked.id)
        return Removed(asked.id)

    async def drain(asked: Asked) -> ServerStatus:
        return await service.drain_server(asked.id, True)

    async def undrain(asked: Asked) -> ServerStatus:
        return await service.drain_server(asked.id, False)

    path = "/v1/servers"
    return [
        Call("GET", path, "LLM servers", servers, list[ServerStatus]),
        Call("POST", path, "Register an outside server", add, ServerStatus, OutsideServer, refusals=(409, 422, 503)),
        Call("DELETE", f"{path}/{{id}}", "Remove an outside server", remove, Removed, refusals=(404, 409)),
        Call("PUT", f"{path}/{{id}}/drain", "Give a server no new rollouts", drain, ServerStatus, refusals=(404,)),
        Call("DELETE", f"{path}/{{id}}/drain", "Give a server rollouts again", undrain, ServerStatus, refusals=(404,)),
    ]
