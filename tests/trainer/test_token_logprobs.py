"""Chunked logprobs equal the plain ones, in value, gradient and without their memory."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prorl_hpc.trainer import policy as policy_module
from prorl_hpc.trainer.policy import Policy
from prorl_hpc.trainer.token_logprobs import token_logprobs

HIDDEN = 8


class Embedded(nn.Module):
    """The least of a causal LM: token embeddings are the hidden states, an output layer follows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(vocabulary, HIDDEN), nn.Linear(HIDDEN, vocabulary, bias=False)
        self.dtype = torch.float32
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=HIDDEN))
        self.__dict__["base_model"] = self._hidden

    def _hidden(self, input_ids: Tensor, **others: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self) -> nn.Module:
        return self.output


def plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits.float() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def own_forward(policy: Policy, count: int, vocabulary: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    ids = torch.arange(count)[None] % vocabulary
    logprobs, entropy, _ = policy(ids, ids, None, torch.arange(count - 1), ids[0, 1:], temperature)
    return logprobs, entropy


def plain_forward(policy: Policy, count: int, vocabulary: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    ids = torch.arange(count) % vocabulary
    return plain(policy.lm.output(policy.lm.embedding(ids[:-1])), ids[1:], temperature)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradient_are_those_of_log_softmax(monkeypatch, dtype, temperature, entropy_gradient):
    monkeypatch.setattr("prorl_hpc.trainer.token_logprobs.SLICE_NUMBERS", 100)  # of three rows each
    torch.manual_seed(1)
    raw = (torch.randn(10, 33) * 4).to(dtype)
    targets, pull, push = torch.randint(33, (10,)), torch.randn(10), torch.randn(10) * entropy_gradient
    found, expected = [], []
    for result, function in ((found, token_logprobs), (expected, plain)):
        leaf = raw.clone().requires_grad_()
        more = {"entropy_gradient": entropy_gradient} if function is token_logprobs else {}
        logprobs, entropy = function(leaf * 1, targets, temperature, **more)
        ((logprobs * pull).sum() + (entropy * push).sum()).backward()
        result += [logprobs.detach(), entropy.detach(), leaf.grad.float()]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_have_the_gradient_of_the_whole(monkeypatch, entropy_gradient):
    monkeypatch.setattr(policy_module, "CHUNK_TOKENS", 7)
    gradients = []
    for forward in (own_forward, plain_forward):
        policy = Policy(Embedded(50), entropy_gradient=entropy_gradient)
        logprobs, entropy = forward(policy, 30, 50, 0.8)
        (logprobs.square().sum() + (entropy.square().sum() if entropy_gradient else 0)).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensor storages that are alive; ``peak`` is the most there were at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(forward, count: int, vocabulary: int, entropy_gradient: bool = False) -> int:
    policy = Policy(Embedded(vocabulary), entropy_gradient=entropy_gradient)
    with Allocations() as allocations:
        logprobs, entropy = forward(policy, count, vocabulary)
        (logprobs.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
    return allocations.peak


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch, entropy_gradient):
    vocabulary, chunk = 50_000, 16
    monkeypatch.setattr(policy_module, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr("prorl_hpc.trainer.token_logprobs.SLICE_NUMBERS", 2 * vocabulary)
    weights, logits = 2 * HIDDEN * vocabulary * 4, 4 * vocabulary  # gradients of both layers; logits of one token
    few, many = (peak_bytes(own_forward, n, vocabulary, entropy_gradient) for n in (65, 193))
    assert many - few < 8 * logits, "128 more tokens, and not the logits of eight"
    # One chunk's logits, and a few rows beside them.
    assert many < 2 * weights + (chunk + 6) * logits
    assert peak_bytes(plain_forward, 193, vocabulary) > 2 * 192 * logits > 5 * many
