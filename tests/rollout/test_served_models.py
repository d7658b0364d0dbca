"""Whether an LLM server serves the model that its policy is."""

from __future__ import annotations

import json
from pathlib import Path

from prorl_hpc.inference.model_identity import identify_model
from prorl_hpc.messages.control import InferenceHello, ServerRef
from prorl_hpc.rollout.served_models import ServedModels


def hello(fingerprint: str, name: str = "inference-0", policy: str = "policy") -> InferenceHello:
    ref = ServerRef(name, "node1", "ipc:///x", "", policy)
    return InferenceHello(ref, "vllm", "m", 0, 100, "one", fingerprint)


def test_a_server_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    served = ServedModels({"policy": tmp_path})
    assert served.path("policy") == tmp_path and served.path("other") is None
    assert served.refusal(hello(identify_model(tmp_path).fingerprint)) == ""
    words = served.refusal(hello("another", "inference-1"))
    assert "LLM server inference-1 on node1 serves another model" in words and "another" in words


def test_where_the_directory_is_not_readable_the_first_server_tells(tmp_path: Path) -> None:
    served = ServedModels({"policy": tmp_path / "elsewhere"})
    assert served.refusal(hello("a")) == "" == served.refusal(hello("a", "inference-1"))
    assert served.refusal(hello("b", "inference-2"))
    assert served.refusal(hello("b", policy="other")) == ""


def test_an_engine_without_a_model_is_let_in() -> None:
    assert ServedModels().refusal(hello("")) == "" == ServedModels().refusal(hello("a"))
