"""The policy as a function of tokens: logprobs at the trained places only, logits never held whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.layout import visibility
from prorl_hpc.trainer.token_logprobs import token_logprobs

CHUNK_TOKENS = 512
"""Places whose logits (× vocabulary, float32) are held at one time."""


def chunks_of(tokens: int) -> int:
    """Into how many parts ``tokens`` places are cut."""
    return max(1, -(-tokens // CHUNK_TOKENS))


class Policy(nn.Module):  # type: ignore[misc]  # torch is not analysed
    """A Hugging Face causal LM whose forward gives token logprobs and entropies, and with a value head the values.
    ``entropy_gradient``: whether the entropies have a gradient; it costs one more copy of a chunk's logits."""

    def __init__(self, lm: nn.Module, *, value_head: bool = False, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = _new_value_head(lm) if value_head else None
        self.entropy_gradient = entropy_gradient
        self.shares_prompts = True
        """Whether the model obeys a given attention mask and positions (rows with shared prompts)."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        sources: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        chunks: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``token_ids``, ``positions``: [B, T]; ``visible``: bool [B, T, T] or None for causal; ``sources``: places [N] in
        the flattened [B·T] whose next token is ``targets`` [N]. Returns (logprobs with gradient, entropies, values with gradient),
        float32 [N], the first two of the distribution at ``temperature``, the third V(s) before each target or None. ``chunks``:
        how many times the output layer is called, 0: as often as N asks for; under ZeRO-3 every call is collective. Right padding
        needs no mask: nothing before it sees it."""
        hidden: Tensor = self.lm.base_model(
            input_ids=token_ids, position_ids=positions, attention_mask=self._bias(visible), use_cache=False
        ).last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1])[sources]
        count = chunks or chunks_of(len(targets))
        parts = []
        for places, wanted in zip(picked.tensor_split(count), targets.tensor_split(count), strict=True):
            if count > 1 and torch.is_grad_enabled():
                # The backward pass computes the chunk's logits again rather than keep them.
                parts.append(checkpoint(self._head, places, wanted, temperature, use_reentrant=False))
            else:
                parts.append(self._head(places, wanted, temperature))
        values = None if self.value_head is None else self.value_head(picked)[:, 0].float()
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), values

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.lm.get_output_embeddings()(hidden)
        return token_logprobs(logits, targets, temperature, entropy_gradient=self.entropy_gradient)

    def _bias(self, visible: Tensor | None) -> Tensor | None:
        """[B, 1, T, T], 0 where attention may go and the dtype's least number elsewhere: what every kernel takes."""
        if visible is None:
            return None
        dtype = self.lm.dtype
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return bias.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    def check_against_model(self) -> str:
        """Compare this forward with the model's own on a few tokens, before training rests on it. Where the model does not
        obey given masks (sliding windows, recurrent layers) prompts are no longer shared; returns a sentence that says
        so, or "". Raises RunError if even plain rows differ: then the model does more to its logits than a linear map."""
        with torch.no_grad():
            return self._compare()

    def _compare(self) -> str:
        device = next(self.parameters()).device
        vocabulary: int = self.lm.config.vocab_size
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (2, 12), generator=draw).to(device)
        ids[1, :6] = ids[0, :6]
        logits = self.lm(input_ids=ids, use_cache=False).logits.float()
        expected = logits[:, 5:-1].log_softmax(-1).gather(-1, ids[:, 6:, None])[..., 0].flatten()
        places = torch.arange(5, 11, device=device)
        positions = torch.arange(12, device=device).repeat(2, 1)
        plain, *_ = self(ids, positions, None, torch.cat([places, places + 12]), ids[:, 6:].flatten())
        tolerance = 1e-3 if self.lm.dtype == torch.float32 else 0.25
        if (gap := float((plain - expected).abs().max())) > tolerance:
            raise RunError(
                f"{type(self.lm).__name__}: logprobs from hidden states and output embeddings differ from the model's own "
                f"by {gap:.3g} nats (allowed: {tolerance}). The model does something else to its logits; it cannot be trained here"
            )
        parts = torch.tensor([[0] * 6 + [1] * 6 + [2] * 6], device=device)
        row = torch.cat([ids[0], ids[1, 6:]])[None]
        row_positions = torch.cat([positions[0], positions[0, 6:]])[None]
        sources = torch.tensor([*range(5, 11), 5, *range(12, 17)], device=device)
        packed, *_ = self(row, row_positions, visibility(parts), sources, ids[:, 6:].flatten())
        gap = float((packed - expected).abs().max())
        if gap > tolerance:
            self.shares_prompts = False
            return (
                f"the model does not take a given attention mask (logprobs differ by {gap:.2g}): prompts are not shared"
            )
        return ""


def _new_value_head(lm: nn.Module) -> nn.Linear:
    """hidden → V(s). It begins as 0 everywhere: the first advantages are the returns, and the value loss cannot shake the model
    before the head has learned something."""
    head = nn.Linear(lm.config.get_text_config().hidden_size, 1, dtype=lm.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_lm(path: str, dtype: torch.dtype) -> nn.Module:
    """Load a causal LM from a Hugging Face directory, dropout off: π_θ must be the distribution that was sampled from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    lm = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, local_files_only=True)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return lm


def load_policy(
    path: str,
    dtype: torch.dtype,
    *,
    gradient_checkpointing: bool = False,
    value_head: bool = False,
    entropy_gradient: bool = False,
) -> Policy:
    """The policy of a Hugging Face directory, ready to be trained."""
    lm = load_lm(path, dtype)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    return Policy(lm, value_head=value_head, entropy_gradient=entropy_gradient)
