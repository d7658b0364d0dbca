"""RolloutClient for synchronous code: the same calls, each waited for.

    with SyncRolloutClient("http://node:port", token) as client:
        groups = client.collect(rows, batch_id="step-1", task="swe", groups_wanted=32, group_size=8)
        for numbered in client.stream(follow=False): ...

The calls are made on one thread with an event loop of its own; they may come from several threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from prorl_hpc.messages.rollout import NumberedResult
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient

P = ParamSpec("P")
T = TypeVar("T")


class _Waited(Generic[P, T]):
    """A call of RolloutClient as one that is waited for, of the same types."""

    def __init__(self, call: Callable[Concatenate[RolloutClient, P], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self.__doc__ = call.__doc__

    def __get__(self, owner: SyncRolloutClient, kind: type[SyncRolloutClient]) -> Callable[P, T]:
        def waited(*args: P.args, **kwargs: P.kwargs) -> T:
            return owner._do(self._call(owner._client, *args, **kwargs))

        waited.__doc__ = self.__doc__
        return waited


class SyncRolloutClient:
    """See RolloutClient. Close it, or use it in a ``with`` block: its thread ends then."""

    submit_batch = _Waited(RolloutClient.submit_batch)
    batch_progress = _Waited(RolloutClient.batch_progress)
    wait_batch = _Waited(RolloutClient.wait_batch)
    cancel_batch = _Waited(RolloutClient.cancel_batch)
    list_batches = _Waited(RolloutClient.list_batches)
    collect = _Waited(RolloutClient.collect)
    submit_rollouts = _Waited(RolloutClient.submit_rollouts)
    get_rollout = _Waited(RolloutClient.get_rollout)
    wait_rollout = _Waited(RolloutClient.wait_rollout)
    cancel_rollout = _Waited(RolloutClient.cancel_rollout)
    list_rollouts = _Waited(RolloutClient.list_rollouts)
    update_weights = _Waited(RolloutClient.update_weights)
    policies = _Waited(RolloutClient.policies)
    workers = _Waited(RolloutClient.workers)
    drain_worker = _Waited(RolloutClient.drain_worker)
    servers = _Waited(RolloutClient.servers)
    add_server = _Waited(RolloutClient.add_server)
    drain_server = _Waited(RolloutClient.drain_server)
    remove_server = _Waited(RolloutClient.remove_server)
    pause = _Waited(RolloutClient.pause)
    resume = _Waited(RolloutClient.resume)
    status = _Waited(RolloutClient.status)
    metrics = _Waited(RolloutClient.metrics)

    def __init__(self, where: str, token: str = "", *, patience_s: float = 30.0) -> None:
        self._begin(RolloutClient(where, token, patience_s=patience_s))

    @classmethod
    def for_run(cls, run: Process | Path | str, *, patience_s: float = 30.0) -> SyncRolloutClient:
        made = cls.__new__(cls)
        made._begin(RolloutClient.for_run(run, patience_s=patience_s))
        return made

    def _begin(self, client: RolloutClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> SyncRolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stream(
        self,
        cursor: int = 0,
        batch_id: str = "",
        follow: bool = True,
        *,
        trajectories: bool = True,
        policy: str = "",
    ) -> Iterator[NumberedResult]:
        """As RolloutClient.stream. Nothing is read ahead of the caller."""
        stream = self._client.stream(cursor, batch_id, follow, trajectories=trajectories, policy=policy)

        async def following() -> NumberedResult | None:
            return await anext(stream, None)

        async def end() -> None:
            await stream.aclose()

        try:
            while (numbered := self._do(following())) is not None:
                yield numbered
        finally:
            self._do(end())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted: so is the call
            raise
