"""The probe of a server outside the run, against a fake one that lacks one thing after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm import API_KEY, CONTEXT, serve_outside

from prorl_hpc.inference import outside_probe
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.outside_probe import ProbedServer, Unready, probe
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.tasks.testing import write_chat_model


async def test_a_server_that_will_do(socket_dir: Path) -> None:
    async with serve_outside(socket_dir / "o.sock", "key") as fake:
        server = OutsideServer("outside", fake.url, api_key=API_KEY)
        assert await probe(server) == ProbedServer("policy", CONTEXT)
        assert [body["max_tokens"] for body in fake.bodies] == [4]


async def test_a_server_on_tcp() -> None:
    async with serve_outside(None) as fake:
        assert (await probe(OutsideServer("outside", fake.url + "/"))).model == "policy"


@pytest.mark.parametrize("key", ["two\nlines", "\0", "schlüssel"])
async def test_a_key_that_http_does_not_carry(key: str) -> None:
    async with serve_outside(None, "key") as fake:
        with pytest.raises(InferenceError, match=r"cannot be asked|answers 40"):
            await probe(OutsideServer("outside", fake.url, api_key=key))


async def test_an_answer_without_end_is_not_kept(socket_dir: Path) -> None:
    async with serve_outside(socket_dir / "o.sock", "endless") as fake:
        with pytest.raises(InferenceError, match="more than 64 MiB"):
            await probe(OutsideServer("outside", fake.url))


async def test_one_of_several_models_is_named(socket_dir: Path) -> None:
    async with serve_outside(socket_dir / "o.sock", "two-models") as fake:
        assert (await probe(OutsideServer("outside", fake.url, model="other"))).model == "other"
        with pytest.raises(InferenceError, match=r"policy, other: say which one"):
            await probe(OutsideServer("outside", fake.url))
        with pytest.raises(InferenceError, match=r"policy, other: model third is not among them"):
            await probe(OutsideServer("outside", fake.url, model="third"))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no-ids", "without token ids"),
        ("no-logprobs", "a logprob for each"),
        ("other-logprobs", "4 token ids and 5 logprobs"),
        ("other-prompt", "another prompt"),
        ("key", "answers 401"),
        ("page", r"answers 404 to /models: 404 No such page\. word word [^\n]{200,270}wo…; needed"),
        ("no-tokens", "returned no tokens"),
        ("more", "returned 5 tokens: asked for were at most 4"),
        ("zeros", "0.0 as the logprob of each of 4 tokens"),
        ("positive", "0.25 as the logprob"),
        ("nan", "without what training needs"),
        ("html", "it begins b'<html>"),
        ("empty", "it is empty"),
    ],
)
async def test_a_server_that_will_not_do_is_refused_with_the_reason(socket_dir: Path, mode: str, words: str) -> None:
    async with serve_outside(socket_dir / "o.sock", mode) as fake:
        with pytest.raises(InferenceError, match=words) as refused:
            await probe(OutsideServer("outside", fake.url, api_key="wrong"))
        assert "LLM server outside at unix:" in str(refused.value) and "needed is vLLM" in str(refused.value)
        assert "wrong" not in str(refused.value) and not isinstance(refused.value, Unready)


async def test_a_server_that_may_be_starting(socket_dir: Path) -> None:
    async with serve_outside(socket_dir / "o.sock", "broken") as fake:
        with pytest.raises(Unready, match=r"outside at unix:.* answers 500"):
            await probe(OutsideServer("outside", fake.url))
    with pytest.raises(Unready, match=r"^LLM server outside at unix:.* does not answer /models: connection refused$"):
        await probe(OutsideServer("outside", fake.url))
    async with serve_outside(None) as fake:
        pass
    with pytest.raises(
        Unready, match=rf"^LLM server outside at {fake.url} does not answer /models: connection refused$"
    ):
        await probe(OutsideServer("outside", fake.url))
    with pytest.raises(Unready, match=r"does not answer /models: [^\[]*$") as refused:
        await probe(OutsideServer("outside", "http://nowhere.invalid:8000/v1"))
    assert "ssl" not in str(refused.value)


async def test_a_silent_server_is_not_waited_for(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_probe, "_LIMIT_S", 0.2)
    async with serve_outside(socket_dir / "o.sock", "silent") as fake:
        with pytest.raises(Unready, match=r"within 0.2 s"):
            await probe(OutsideServer("outside", fake.url))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_chat_model(tmp_path_factory.mktemp("model"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 448}))
    return path


def with_another_tokenizer(model: Path, path: Path) -> Path:
    """The same vocabulary, but two ids are exchanged."""
    text = (model / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize("modes", [(), ("no-tokenize",)])
async def test_its_vocabulary_is_ours(socket_dir: Path, chat_model: Path, modes: tuple[str, ...]) -> None:
    async with serve_outside(socket_dir / "o.sock", *modes, model=chat_model) as fake:
        assert await probe(OutsideServer("outside", fake.url), chat_model) == ProbedServer("policy", CONTEXT, 448)
        asked = fake.bodies[-1]
        assert max(asked["prompt"]) == ModelText(chat_model).size - 1


@pytest.mark.parametrize("modes", [(), ("no-tokenize",)])
async def test_another_vocabulary_is_refused(
    socket_dir: Path, tmp_path: Path, chat_model: Path, modes: tuple[str, ...]
) -> None:
    other = with_another_tokenizer(chat_model, tmp_path / "other")
    async with serve_outside(socket_dir / "o.sock", *modes, model=other) as fake:
        with pytest.raises(InferenceError, match=r"another vocabulary than this run's model.*from token 1 on"):
            await probe(OutsideServer("outside", fake.url), chat_model)


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        (("no-tokenize", "no-echo"), "does not show its vocabulary"),
        (("small",), "out of vocabulary"),
        (("big-ids",), r"token id 1000000, which is not in the model's vocabulary \(0 to 447\)"),
    ],
)
async def test_a_vocabulary_that_is_not_shown_or_does_not_fit_is_refused(
    socket_dir: Path, chat_model: Path, modes: tuple[str, ...], words: str
) -> None:
    async with serve_outside(socket_dir / "o.sock", *modes, model=chat_model) as fake:
        with pytest.raises(InferenceError, match=words):
            await probe(OutsideServer("outside", fake.url), chat_model)


@pytest.mark.parametrize(
    "url",
    [
        "unix:/nowhere/x.sock",
        "unix:/" + "x" * 200,
        "unix:/a\0b",
        "http://127.0.0.1:1/v1",
        "http://127.0.0.1:99999/v1",
        "http://[/v1",
        "http://",
        "http://a b/v1",
        "tcp://host:1",
        "",
    ],
)
async def test_an_address_where_nothing_is(url: str) -> None:
    with pytest.raises(InferenceError, match="LLM server outside"):
        await probe(OutsideServer("outside", url))


def test_the_coordinator_needs_no_engine_to_probe() -> None:
    code = """
import sys
import prorl_hpc.inference.outside_probe
print(sorted({"vllm", "torch", "transformers", "zmq"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
