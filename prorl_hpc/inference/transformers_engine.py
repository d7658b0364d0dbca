"""An engine in this process, on torch and transformers alone: for machines without vLLM.

One thread owns the model. Between tokens it admits what is waiting, so a request never waits for another to
finish: those that arrive together form a cohort (left-padded, one key-value cache), and every cohort advances
by one token in turn. There is no prefix cache to forget.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.model_identity import ModelIdentity, identify_model
from prorl_hpc.inference.offered_weights import check_offer
from prorl_hpc.inference.protocol import EngineLoad, ServerDown
from prorl_hpc.inference.stop_text import StopText
from prorl_hpc.inference.streamed_weights import streamed_tensors
from prorl_hpc.inference.transformers_batch import Cohort, Request, sample, uncancellable
from prorl_hpc.messages.errors import InferenceError, TransportError
from prorl_hpc.messages.inference import Completion, FinishReason, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams

T = TypeVar("T")
_JOIN_S = 4.0


_Offered = tuple[str, list[int], Callable[[], torch.Tensor]]
"""Name, shape, and how to get it."""


def _in_files(paths: Sequence[str]) -> list[_Offered]:
    """Nothing is read before it is asked for. InferenceError."""
    try:
        files: list[Any] = [safe_open(path, framework="pt", device="cpu") for path in paths]
    except (OSError, SafetensorError) as error:
        raise InferenceError(f"the transformers engine: {list(paths)} cannot be read: {error}") from error
    return [
        (name, file.get_slice(name).get_shape(), functools.partial(file.get_tensor, name))
        for file in files
        for name in file.keys()  # noqa: SIM118 - a safetensors handle is no dict
    ]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class TransformersEngine:
    """See Engine. Runs on the visible GPU number ``gpu``, else on the CPU with ``config.threads`` threads.
    ``weight_secret``: the file with which it asks a trainer that streams weights."""

    description = f"transformers {__version__}"

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        max_context_tokens: int,
        gpu: int = 0,
        weight_secret: Path | None = None,
    ) -> None:
        self._path = model_path
        self._weight_secret = weight_secret
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._device = torch.device(f"cuda:{gpu}" if torch.cuda.is_available() else "cpu")
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._cohorts: list[Cohort] = []
        self._broken: Future[str] = uncancellable()
        self._model_identity = ModelIdentity()
        self._counts = [0, 0]
        self.weight_version = 0

    @property
    def model(self) -> ModelIdentity:
        return self._model_identity

    async def start(self, progress: Callable[[str], None]) -> None:
        self._model_identity = identify_model(self._path)
        progress(f"transformers: loading {self._path.name} on {self._device}")
        self._thread.start()
        await self._in_thread(self._load_model)

    def _load_model(self) -> None:
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.threads)
        auto = "float32" if self._device.type == "cpu" else "bfloat16"
        dtype = auto if self._config.dtype == "auto" else self._config.dtype
        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=getattr(torch, dtype), local_files_only=True)
        self._model = model.eval().to(self._device)
        self._tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        ends = [self._tokenizer.eos_token_id]
        listed = model.generation_config.eos_token_id
        ends += listed if isinstance(listed, list) else [listed]
        self._end_ids = frozenset(end for end in ends if end is not None)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Run between two tokens in the model's thread."""
        self._check_alive()
        done: Future[T] = uncancellable()

        def call() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._work.put(call)
        try:
            return await asyncio.wrap_future(done)
        except Exception as error:
            raise InferenceError(f"the transformers engine: {type(error).__name__}: {error}") from error

    def _check_alive(self) -> None:
        if self._broken.done():
            raise ServerDown(f"the transformers engine is down: {self._broken.result()}")

    def _run(self) -> None:
        """The model's thread: what is asked for in between, then one token for everybody."""
        try:
            with torch.inference_mode():
                while self._do_work():
                    self._admit()
                    for cohort in self._cohorts:
                        self._advance(cohort)
                    self._cohorts = [cohort for cohort in self._cohorts if cohort.requests]
            self._give_up("it was stopped")
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _do_work(self) -> bool:
        """Do what is asked for, waiting for it only when there is nothing to generate; False: stop."""
        idle = not self._waiting and not self._cohorts
        while idle or not self._work.empty():
            call = self._work.get()
            if call is None:
                return False
            call()
            idle = False
        return True

    def _give_up(self, why: str) -> None:
        self._broken.set_result(why)
        for request in list(self._requests.values()):
            if not request.result.done():
                request.result.set_exception(ServerDown(f"the transformers engine is down: {why}"))

    def _admit(self) -> None:
        for request in self._waiting:
            if request.ended:
                request.finish(FinishReason.ABORT)
        active = sum(len(cohort.requests) for cohort in self._cohorts)
        waiting = sorted((r for r in self._waiting if not r.ended), key=lambda r: r.priority)
        room = max(0, self._config.max_parallel_requests - active)
        self._waiting = waiting[room:]
        if waiting[:room]:
            self._cohorts.append(Cohort.of(waiting[:room], self._device))

    def _advance(self, cohort: Cohort) -> None:
        positions = (cohort.mask.cumsum(-1) - 1).clamp(min=0)[:, -cohort.inputs.shape[1] :]
        logits = self._model(
            input_ids=cohort.inputs,
            attention_mask=cohort.mask,
            position_ids=positions,
            past_key_values=cohort.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens, logprobs = sample(logits, cohort.requests)
        rows = []
        for row, (request, token, logprob) in enumerate(
            zip(cohort.requests, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if request.ended:
                request.finish(FinishReason.ABORT)
                continue
            reason = request.add(token, logprob, self.weight_version)
            self._counts[1] += 1
            if reason is None:
                rows.append(row)
            else:
                request.finish(reason)
        if rows:
            cohort.keep(rows, tokens)
        else:
            cohort.requests = []

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, priority: int
    ) -> Completion:
        self._check_alive()
        self._check_prompt(token_ids)
        random = torch.Generator()
        if sampling.seed is None:
            random.seed()
        else:
            random.manual_seed(sampling.seed)
        stops = self._end_ids | frozenset(sampling.stop_token_ids)
        limit = min(sampling.max_tokens, self._max_context_tokens - len(token_ids))
        stop_text = StopText(self._decode, sampling.stop)
        request = Request(list(token_ids), sampling, priority, random, stops, limit, stop_text)
        self._requests[request_id] = request
        self._counts[0] += len(token_ids)
        self._work.put(lambda: self._waiting.append(request))
        try:
            return await asyncio.wrap_future(request.result)
        finally:
            request.ended = True
            del self._requests[request_id]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        vocabulary = self._model.config.get_text_config().vocab_size
        if not 0 < len(token_ids) < self._max_context_tokens:
            raise InferenceError(
                f"the prompt has {len(token_ids)} tokens, allowed are 1 to {self._max_context_tokens - 1} "
                "(model.max_context_tokens, less one for the answer)"
            )
        if max(token_ids) >= vocabulary or min(token_ids) < 0:
            raise InferenceError(f"the prompt has token ids outside 0..{vocabulary - 1}")

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.ended = True

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._check_prompt(token_ids)
        return await self._in_thread(lambda: self._score(list(token_ids)))

    def _score(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._device)
        logprobs = self._model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        scores: list[float] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
        return scores

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.to_thread(check_offer, update, self._weight_secret, "the transformers engine")
        offered = (
            await asyncio.to_thread(self._streamed, update) if update.source is not None else _in_files(update.paths)
        )
        await self._in_thread(lambda: self._load_weights(update.version, offered))

    def _streamed(self, update: WeightUpdate) -> list[_Offered]:
        """All of it first: a stream may break off."""
        assert update.source is not None and self._weight_secret is not None
        try:
            tensors = list(streamed_tensors(update.source, self._weight_secret))
        except (OSError, TransportError, ValueError) as error:
            raise InferenceError(f"the transformers engine: weights {update.version} broke off: {error}") from error
        return [(name, list(tensor.shape), functools.partial(_itself, tensor)) for name, tensor in tensors]

    def _load_weights(self, version: int, offered: list[_Offered]) -> None:
        """Copy into the model; nothing is changed unless every name and shape fits."""
        state: dict[str, torch.Tensor] = self._model.state_dict()
        wrong = [name for name, shape, _ in offered if name not in state or list(state[name].shape) != shape]
        given = {state[name].data_ptr() for name, _, _ in offered if name in state}
        absent = [name for name, tensor in state.items() if tensor.data_ptr() not in given]
        if wrong or absent:
            raise ValueError(f"weights {version} do not fit: wrong {wrong[:5]}, absent {absent[:5]}")
        for name, _, read in offered:
            state[name].copy_(read())
        self.weight_version = version

    async def load(self) -> EngineLoad:
        self._check_alive()
        waiting = len(self._waiting)
        return EngineLoad(len(self._requests) - waiting, waiting, self._counts[0], self._counts[1])

    async def wait_broken(self) -> str:
        return await asyncio.shield(asyncio.wrap_future(self._broken))

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._work.put(None)
            await asyncio.to_thread(self._thread.join, _JOIN_S)
