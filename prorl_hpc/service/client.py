"""The client that trainers use. Needs aiohttp and msgspec, nothing of the service itself.

    async with RolloutClient("http://node:port", token) as client:   # or RolloutClient("/path/of/the.socket"),
                                                                     # or RolloutClient.for_run("runs/latest")
        groups = await client.collect(rows, batch_id="step-1", task="swe", groups_wanted=32, group_size=8)

All calls can be made again without harm, because their ids are the client's; so a lost connection is
tried again for a while before it is an error. service.sync_client has the same calls for synchronous code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, GroupOutcome, GroupResult
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import NumberedResult, RolloutProgress, RolloutResult, RolloutSpec, Status
from prorl_hpc.messages.status import Phase, PolicyStatus, ProcessState, RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.observe.process import Process
from prorl_hpc.service.connection import LOST, AskedForPatience, Connection, Where, refusal_of
from prorl_hpc.transport.keys import RunKeys

T = TypeVar("T")

_WAIT_S = 20.0
_ANSWER_S = 60.0
_SILENCE_S = 30.0
"""Three times the time after which a stream without results says that it is there."""
_WEIGHTS_S = 960.0
"""A little more than the service waits for its servers."""


class RolloutClient:
    """Raises ServiceError: with the service's own code and status when it refused, with code ``unreachable`` when it
    could not be reached for ``patience_s`` seconds. 429 and 503 with Retry-After are asked again for as long."""

    def __init__(self, where: str, token: str = "", *, patience_s: float = 30.0) -> None:
        """``where``: ``http://host:port``, or the path of a Unix socket (which needs no token). Raises ValueError."""
        if "/" not in where:
            raise ValueError(
                f"{where!r} is no address of a rollout service: give http://host:port or /path/of/a.socket"
            )
        self._connection = Connection(Where(where, token), patience_s)

    @classmethod
    def for_run(cls, run: Process | Path | str, *, patience_s: float = 30.0) -> RolloutClient:
        """The service of a run, once its coordinator is READY (``Process.wait_for``). ``run``: its directory, or a
        process of it. When the service is lost it is looked for again: that of a resumed run has another address."""
        directory, node = (run.run, run.node) if isinstance(run, Process) else (_opened(run), node_name())

        def locate() -> Where | None:
            try:
                return _service_of(directory, node)
            except ServiceError:
                return None  # not ready yet; whoever asks goes on trying

        where = _service_of(directory, node)
        client = cls(where.address, where.token, patience_s=patience_s)
        client._connection = Connection(where, patience_s, locate)
        return client

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        return await self._call("POST", "/v1/batches", BatchProgress, body=spec)

    async def batch_progress(self, batch_id: str) -> BatchProgress:
        return await self._call("GET", _path("batches", batch_id), BatchProgress)

    async def wait_batch(self, batch_id: str) -> BatchResult:
        """However long it takes."""
        return await self._wait(_path("batches", batch_id, "result"), BatchResult)

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        """409 ``already_finished`` if it has ended otherwise."""
        return await self._call("DELETE", _path("batches", batch_id), BatchProgress)

    async def list_batches(self, *, after: str = "", limit: int = 100) -> list[BatchProgress]:
        """A page, in the order of acceptance; ``after`` is the last id of the page before."""
        return await self._call("GET", "/v1/batches", list[BatchProgress], query={"after": after, "limit": limit})

    async def collect(
        self,
        /,
        rows: Sequence[dict[str, Any]],
        *,
        groups_wanted: int,
        group_size: int,
        batch_id: str,
        task: str,
        **more: Any,
    ) -> list[GroupResult]:
        """Order a batch, wait for it, return its accepted groups: fewer than ``groups_wanted`` if the rows were used
        up. ``more``: other fields of BatchSpec. The same call again goes on with the same batch."""
        spec = BatchSpec(batch_id, task, list(rows), groups_wanted, group_size, **more)
        await self.submit_batch(spec)
        result = await self.wait_batch(batch_id)
        return [group for group in result.groups if group.outcome is GroupOutcome.ACCEPTED]

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        return await self._call("POST", "/v1/rollouts", list[RolloutProgress], body=specs)

    async def get_rollout(self, rollout_id: str) -> RolloutProgress:
        return await self._call("GET", _path("rollouts", rollout_id), RolloutProgress)

    async def wait_rollout(self, rollout_id: str) -> RolloutResult:
        """However long it takes."""
        return await self._wait(_path("rollouts", rollout_id, "result"), RolloutResult)

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        """409 ``already_finished`` if it has ended otherwise."""
        return await self._call("DELETE", _path("rollouts", rollout_id), RolloutProgress)

    async def list_rollouts(
        self,
        *,
        status: Status | None = None,
        batch_id: str = "",
        policy: str = "",
        after: str = "",
        limit: int = 100,
    ) -> list[RolloutProgress]:
        """A page: those under way, then those that ended; ``after`` is the last id of the page before."""
        query = {"status": status or "", "batch_id": batch_id, "policy": policy, "after": after, "limit": limit}
        return await self._call("GET", "/v1/rollouts", list[RolloutProgress], query=query)

    # results

    async def stream(
        self,
        cursor: int = 0,
        batch_id: str = "",
        follow: bool = True,
        *,
        trajectories: bool = True,
        policy: str = "",
    ) -> AsyncGenerator[NumberedResult, None]:
        """Results as they get onto disk, behind ``cursor``; with ``follow`` without end. A lost connection is made
        again behind the last result that came."""
        connection, patience = self._connection, self._connection.patience()
        while True:
            query = {
                "cursor": cursor,
                "batch_id": batch_id,
                "policy": policy,
                "follow": _word(follow),
                "trajectories": _word(trajectories),
            }
            path = "/v1/results" + _query(query)
            try:
                async with aclosing(connection.lines(path, _SILENCE_S)) as lines:
                    async for line in lines:
                        patience.restored()
                        if line:
                            numbered = _numbered(line)
                            cursor = numbered.cursor
                            yield numbered
                if not follow:
                    return
                raise TimeoutError("the service ended the stream")
            except (*LOST, AskedForPatience) as error:
                await connection.lost(error, patience)

    # the run

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        """One answer per LLM server; look at each one's ``error``."""
        return await self._call("POST", "/v1/weights", list[WeightUpdated], body=update, answer_s=_WEIGHTS_S)

    async def policies(self) -> list[PolicyStatus]:
        return await self._call("GET", "/v1/policies", list[PolicyStatus])

    async def workers(self) -> list[WorkerStatus]:
        return await self._call("GET", "/v1/workers", list[WorkerStatus])

    async def drain_worker(self, worker_id: str, on: bool = True) -> WorkerStatus:
        """A draining worker gets no new rollouts; ``on`` False: it gets them again."""
        return await self._call(_switch(on), _path("workers", worker_id, "drain"), WorkerStatus)

    async def servers(self) -> list[ServerStatus]:
        return await self._call("GET", "/v1/servers", list[ServerStatus])

    async def add_server(self, server: OutsideServer) -> ServerStatus:
        """422 with the reason if the service cannot use it."""
        return await self._call("POST", "/v1/servers", ServerStatus, body=server)

    async def drain_server(self, server_id: str, on: bool = True) -> ServerStatus:
        return await self._call(_switch(on), _path("servers", server_id, "drain"), ServerStatus)

    async def remove_server(self, server_id: str) -> None:
        """409 for the run's own. One that is gone already, as when this call is made again, is an error 404."""
        await self._call("DELETE", _path("servers", server_id), dict[str, str])

    async def pause(self, holder: str = "", for_s: float = 0.0) -> RunStatus:
        """Start no rollout until resumed; those under way go on. With ``holder`` and ``for_s``: a pause of its own, over by itself
        after so many seconds, at most 3600; the same holder again begins it anew."""
        return await self._call("POST", f"/v1/pause?{urlencode({'holder': holder, 'for_s': for_s})}", RunStatus)

    async def resume(self, holder: str = "") -> RunStatus:
        """End the lasting pause; with ``holder`` that one's, and no other."""
        return await self._call("POST", f"/v1/resume?{urlencode({'holder': holder})}", RunStatus)

    async def status(self) -> RunStatus:
        return await self._call("GET", "/v1/status", RunStatus)

    async def metrics(self) -> str:
        """Prometheus text."""
        _, body = await self._connection.ask("GET", "/metrics", None, _ANSWER_S)
        return body.decode()

    # machinery

    async def _wait(self, path: str, type_: type[T]) -> T:
        while True:
            asked = f"{path}?wait_s={_WAIT_S:g}"
            status, body = await self._connection.ask("GET", asked, None, _WAIT_S + _ANSWER_S)
            if status != 202:
                return _decode(body, type_)

    async def _call(
        self,
        method: str,
        path: str,
        type_: type[T],
        *,
        query: dict[str, Any] | None = None,
        body: Any = None,
        answer_s: float = _ANSWER_S,
    ) -> T:
        payload = None if body is None else msgspec.json.encode(body)
        _, answer = await self._connection.ask(method, path + _query(query or {}), payload, answer_s)
        return _decode(answer, type_)


def _opened(path: Path | str) -> RunDirectory:
    """``runs/latest`` is what it links to now. Raises RunDirectoryError."""
    return RunDirectory.open(Path(path).resolve())


def _service_of(run: RunDirectory, node: str) -> Where:
    """Where the run's coordinator serves now. Raises ServiceError ``unreachable``."""
    state = read_json(run.process_state("coordinator"), ProcessState)
    if state is None or state.phase is not Phase.READY:
        if state is not None and state.phase is Phase.ENDED:
            words = f"is ended: start it again with python -m prorl_hpc resume {run.path}"
        else:
            words = f"{'has not started' if state is None else f'is {state.phase}'}: wait until it is ready"
        message = f"the coordinator of {run.run_id} {words}"
        raise ServiceError(message, code="unreachable", status=503)
    if state.node == node:
        return Where(state.endpoints["uds"])
    if "http" not in state.endpoints:
        message = f"the service on {state.node} has no TCP port, and this is {node}: set rollout.http_tcp=true"
        raise ServiceError(message, code="unreachable", status=503)
    return Where(state.endpoints["http"], RunKeys.load(run.keys).api_token)


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _query(values: dict[str, Any]) -> str:
    given = {name: value for name, value in values.items() if value != ""}
    return "?" + urlencode(given) if given else ""


def _switch(on: bool) -> str:
    return "PUT" if on else "DELETE"


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _numbered(line: bytes) -> NumberedResult:
    """A line of the stream; raises what the service says went wrong in its midst."""
    try:
        return msgspec.json.decode(line, type=NumberedResult)
    except msgspec.DecodeError:
        raise refusal_of(503, line) from None


def _decode(body: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.DecodeError as error:
        message = f"the service answered what this version of the client does not understand: {error}"
        raise ServiceError(message, code="bad_answer", status=502) from error
