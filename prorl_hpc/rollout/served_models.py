"""Which model each policy is, and whether an LLM server serves that one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prorl_hpc.inference.model_identity import identify_model
from prorl_hpc.messages.control import InferenceHello


class ServedModels:
    """``paths``: policy → model directory. Where that cannot be read from here, the first server of the policy tells what
    the others must serve."""

    def __init__(self, paths: Mapping[str, Path] | None = None) -> None:
        self._paths = paths or {}
        self._expected: dict[str, str] = {}

    def path(self, policy: str) -> Path | None:
        """The model directory, if there is one here."""
        path = self._paths.get(policy)
        return path if path is not None and path.is_dir() else None

    def refusal(self, hello: InferenceHello) -> str:
        """Why this server may not join; empty: it may."""
        policy = hello.server.policy
        expected = self._expected.get(policy, "")
        if not expected and (path := self.path(policy)) is not None:
            expected = identify_model(path).fingerprint
        expected = self._expected[policy] = expected or hello.fingerprint
        if not hello.fingerprint or hello.fingerprint == expected:
            return ""
        return (
            f"LLM server {hello.server.server_id} on {hello.server.node} serves another model or vocabulary than policy "
            f"{policy} is ({hello.model}, fingerprint {hello.fingerprint}; expected is {expected}): the directory "
            f"{self._paths.get(policy, 'of model.path')} must be the same on all nodes and stay so while the run lives"
        )
