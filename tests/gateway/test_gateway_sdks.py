"""The real ``openai`` and ``anthropic`` packages against the gateway, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from gateway_site import Site, gateway_site

from prorl_hpc.agents.chat_format import ChatFormat

CALLING = '<think>hm</think>so <call>{"name": "bash", "arguments": {"command": "ls"}}</call>'


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the outside agents' environment."""
    venv = Path(os.environ.get("PRORL_AGENTS_VENV", Path(__file__).parents[2] / ".setup" / "agents-venv"))
    found = (
        list(venv.glob("lib/python3*/site-packages/openai")),
        list(venv.glob("lib/python3*/site-packages/anthropic")),
    )
    if not all(found):
        pytest.skip(
            f"no openai and anthropic packages at {venv}: run `scripts/setup.sh test`, or set PRORL_AGENTS_VENV"
        )
    return venv / "bin" / "python"


async def run_case(python: Path, site: Site, case: str, mode: str) -> list[str]:
    script = str(Path(__file__).with_name("sdk_calls.py"))
    process = await asyncio.create_subprocess_exec(
        str(python), script, case, mode, str(site.gateway.socket), site.session.key, stdout=-1, stderr=-1
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: list[str] = json.loads(out)
    return found


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("case", ["chat", "responses", "messages"])
async def test_a_conversation_with_a_tool(chat: ChatFormat, python: Path, case: str, mode: str) -> None:
    async with gateway_site(chat, [CALLING, "done"]) as site:
        assert await run_case(python, site, case, mode) == ["bash", "ls", "done"]
        assert site.trajectory.branches == [] and site.trained(site.trajectory) == [CALLING, "done"]
        assert [m.role for m in site.trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("mode", ["whole", "stream"])
async def test_refusals_are_the_sdks_own_errors_and_are_not_tried_again(
    chat: ChatFormat, python: Path, mode: str
) -> None:
    async with gateway_site(chat, ["x"], max_calls=1) as site:
        assert await run_case(python, site, "openai_refusals", mode) == [
            "BadRequestError n None",
            "BadRequestError messages context_length_exceeded",
            "PermissionDeniedError None rollout_over",
            "invalid_api_key",
            "policy",
        ]
        assert site.session._asked == 2, "nothing was asked twice"
    async with gateway_site(chat, ["x"], max_calls=1) as site:
        assert await run_case(python, site, "anthropic_refusals", mode) == [
            "BadRequestError invalid_request_error",
            "BadRequestError invalid_request_error",
            "PermissionDeniedError permission_error",
            "authentication_error",
            "policy",
        ]
