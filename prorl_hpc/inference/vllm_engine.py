"""vLLM as an Engine: a server process of our own behind a Unix socket, spoken to in token ids.

The server is watched for as long as the engine lives. When it dies, what was in flight fails with its last
words, and it is started again, with the weights that lie on disk (version 0), up to ``restarts`` times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from prorl_hpc.inference.model_identity import ModelIdentity, identify_model
from prorl_hpc.inference.offered_weights import check_offer
from prorl_hpc.inference.protocol import EngineLoad, ServerDown
from prorl_hpc.inference.vllm_http import VllmHttp
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import check_weight_plugin, vllm_version
from prorl_hpc.inference.vllm_wire import completion_of, generate_body, prompt_logprobs_of, sampling_params
from prorl_hpc.inference.weight_receiver import update_info
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams

log = logging.getLogger(__name__)

_ABORT_RETRY_S = 0.2
_MAX_BACKOFF_S = 30.0


class VllmEngine:
    """See Engine. ``make_process`` makes a fresh, not yet started server process; ``name`` is for messages."""

    def __init__(
        self, make_process: Callable[[], VllmProcess], name: str, max_context_tokens: int, restarts: int
    ) -> None:
        self._make_process = make_process
        self._name = name
        self._max_context_tokens = max_context_tokens
        self._restarts_left = restarts
        self._process = make_process()
        self._http: VllmHttp | None = None
        self._model = ModelIdentity()
        self._answered_at = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._trouble = "it was not started"
        self._restart_progress = ""
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests: dict[str, asyncio.Event] = {}
        self._weight_version = 0
        self._cache_generation = 0
        self._updating = asyncio.Lock()
        self._tokens_before_restart = (0, 0)
        self._load = EngineLoad(0, 0, 0, 0)

    @property
    def description(self) -> str:
        return f"vllm {vllm_version()}"

    @property
    def model(self) -> ModelIdentity:
        return self._model

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def serving(self) -> bool:
        """False before the start, while it is being started again, and after the end."""
        return self._serving.is_set()

    async def start(self, progress: Callable[[str], None]) -> None:
        check_weight_plugin()
        await self._start_process(progress)
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise {self._name}")

    async def _start_process(self, progress: Callable[[str], None]) -> None:
        self._check_model()
        await self._process.start(progress)
        self._http = VllmHttp(self._process.settings.socket, self._name, self._process.obituary)
        self._answered_at = time.monotonic()
        await self._post("/init_weight_transfer_engine", {"init_info": {}})
        await self._post("/update_weight_version", {"new_version": "0"})
        self._weight_version = 0
        self._serving.set()

    def _check_model(self) -> None:
        """A directory that has become another model's would be served under the old one's name."""
        path = self._process.settings.model_path
        found = identify_model(path)
        if self._model.fingerprint not in ("", found.fingerprint):
            raise InferenceError(
                f"{self._name}: {path} holds another model or vocabulary than when this server first started "
                f"({found.fingerprint or 'none'}, vocabulary {found.vocab_size}; it was {self._model.fingerprint}, "
                f"{self._model.vocab_size}): start a run of its own for it"
            )
        self._model = found

    async def _supervise(self) -> None:
        backoff_s = 1.0
        try:
            while True:
                await self._process.wait()
                await self._after_death()
                while not self._serving.is_set():
                    if self._restarts_left == 0:
                        self._broken.set_result(self._trouble)
                        return
                    self._restarts_left -= 1
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                    await self._start_again()
        except Exception as error:
            log.exception("%s: the vLLM server cannot be kept running", self._name)
            self._broken.set_result(f"{self._trouble}\n{error!r}")

    async def _after_death(self) -> None:
        self._serving.clear()
        self._weight_version = 0
        self._trouble = self._process.obituary("died")
        log.error("%s: %s", self._name, self._trouble)
        await self._end_process()

    async def _start_again(self) -> None:
        log.warning("%s: starting the vLLM server again; %d more restarts remain", self._name, self._restarts_left)
        self._process = self._make_process()
        try:
            await self._start_process(self._note_restart)
        except InferenceError as error:
            self._trouble = str(error)
            log.error("%s: %s", self._name, error)
            await self._end_process()

    def _note_restart(self, progress: str) -> None:
        """Heartbeats tell it, since a server that is started again answers nobody else."""
        self._restart_progress = progress

    async def _end_process(self) -> None:
        self._tokens_before_restart = (self._load.prompt_tokens, self._load.generated_tokens)
        self._restart_progress = ""
        if self._http is not None:
            await self._http.close()
            self._http = None
        await self._process.stop()

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, priority: int
    ) -> Completion:
        room = self._max_context_tokens - len(token_ids)
        if room < 1:
            raise InferenceError(
                f"{self._name}: the prompt has {len(token_ids)} tokens, model.max_context_tokens is "
                f"{self._max_context_tokens} and a turn needs at least one more"
            )
        params = sampling_params(sampling, min(sampling.max_tokens, room))
        done = self._requests[request_id] = asyncio.Event()
        try:
            return completion_of(await self._post_generate(request_id, token_ids, params, priority), self._name)
        finally:
            done.set()
            del self._requests[request_id]

    async def _post_generate(
        self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], priority: int
    ) -> bytes:
        # Blocks of older weights never match: vLLM cannot drop those that running requests hold.
        salt = f"weights-{self._cache_generation}"
        body = generate_body(request_id, token_ids, params, priority, salt)
        return await self._open_http().post("/inference/v1/generate", body)

    async def abort(self, request_id: str) -> None:
        # An abort that overtakes its request does nothing in vLLM: repeat it until the request has ended.
        while (done := self._requests.get(request_id)) is not None and not done.is_set():
            await self._post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})
            try:
                await asyncio.wait_for(done.wait(), _ABORT_RETRY_S)
            except TimeoutError:
                continue

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        request_id = f"score-{self._name}-{id(token_ids)}"
        answer = await self._post_generate(request_id, token_ids, params, priority=0)
        return prompt_logprobs_of(answer, token_ids, self._name)

    async def update_weights(self, update: WeightUpdate) -> None:
        secret = self._process.settings.weight_secret
        await asyncio.to_thread(check_offer, update, secret, self._name)
        async with self._updating:
            await self._until_serving()
            begun = False
            try:
                await self._post("/pause?mode=keep")
                # From here to the resume nothing is computed, so what is sent now runs on the new weights alone.
                self._cache_generation += 1
                await self._post("/start_weight_update")
                begun = True
                await self._post("/update_weights", {"update_info": update_info(update, secret)})
                await self._post("/finish_weight_update", {"weight_version": str(update.version)})
                await self._post("/reset_prefix_cache")
            except BaseException:
                if begun and update.source is not None:
                    self._give_up_halves(update)
                else:
                    await self._resume_after_failure()
                raise
            await self._post("/resume")
            self._weight_version = update.version

    def _give_up_halves(self, update: WeightUpdate) -> None:
        """A stream that broke off has left some tensors new and some old, and requests in flight must not go on with
        those. Files were all there when it began."""
        log.error("%s: weights %d broke off: killing the vLLM server", self._name, update.version)
        self._process.kill()

    async def _resume_after_failure(self) -> None:
        """Requests in flight go on even if the update did not; its own error is the one that is raised."""
        try:
            await self._post("/resume")
        except InferenceError as error:
            log.error("%s: cannot resume after a failed weight update: %s", self._name, error)

    async def _until_serving(self) -> None:
        limit_s = self._process.settings.engine.start_timeout_s
        try:
            await asyncio.wait_for(self._serving.wait(), limit_s)
        except TimeoutError:
            raise ServerDown(f"{self._name}: not serving for {limit_s:.0f} s: {self._trouble}") from None

    async def load(self) -> EngineLoad:
        """From the server's own metrics; InferenceError while it does not serve."""
        counters = await self._counters()
        prompt_before, generated_before = self._tokens_before_restart
        self._load = EngineLoad(
            running=counters["vllm:num_requests_running"],
            waiting=counters["vllm:num_requests_waiting"],
            prompt_tokens=prompt_before + counters["vllm:prompt_tokens_total"],
            generated_tokens=generated_before + counters["vllm:generation_tokens_total"],
        )
        return self._load

    async def wait_broken(self) -> str:
        return await asyncio.shield(self._broken)

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        self._serving.clear()
        self._trouble = "it was stopped"
        await self._end_process()

    async def _counters(self) -> dict[str, int]:
        """One that has not told for as long as a start may take is hung: it is killed, and started again."""
        http = self._open_http()
        try:
            counters = await http.counters()
        except ServerDown:
            silent_s, limit_s = time.monotonic() - self._answered_at, self._process.settings.engine.start_timeout_s
            if silent_s > limit_s:
                log.error("%s: the vLLM server has not answered for %.0f s: killing it", self._name, silent_s)
                self._process.kill()
            raise
        self._answered_at = time.monotonic()
        return counters

    def _open_http(self) -> VllmHttp:
        if self._http is None:
            again = f" (it is being started again: {self._restart_progress})" if self._restart_progress else ""
            raise ServerDown(f"{self._name}: the vLLM server is not serving{again}: {self._trouble}")
        return self._http

    async def _post(self, route: str, body: Any = None) -> bytes:
        return await self._open_http().post(route, msgspec.json.encode(body) if body is not None else b"")
