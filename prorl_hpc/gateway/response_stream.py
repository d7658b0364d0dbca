"""The stream events of one output item of OpenAI Responses."""

from __future__ import annotations

from typing import Any

from prorl_hpc.gateway.api import pieces


def item_events(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """In the order in which OpenAI sends them, without their sequence numbers."""
    inner = {"message": _text_events, "reasoning": _thought_events, "function_call": _call_events}
    hollow: tuple[str, Any] = ("arguments", "") if item["type"] == "function_call" else ("content", [])
    empty = {**item, "status": "in_progress", hollow[0]: hollow[1]}
    place = {"item_id": item["id"], "output_index": index}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *inner[item["type"]](item, place),
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _text_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    place = {**place, "content_index": 0}
    told = [
        {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []} for text in pieces(part["text"])
    ]
    done = {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": part["logprobs"]}
    return _part(part, place, [*told, done])


def _thought_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    place = {**place, "content_index": 0}
    told = [{"type": "response.reasoning_text.delta", **place, "delta": text} for text in pieces(part["text"])]
    return _part(part, place, [*told, {"type": "response.reasoning_text.done", **place, "text": part["text"]}])


def _part(part: dict[str, Any], place: dict[str, Any], inner: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        *inner,
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _call_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    kind = "response.function_call_arguments"
    told = [{"type": f"{kind}.delta", **place, "delta": text} for text in pieces(item["arguments"])]
    return [*told, {"type": f"{kind}.done", **place, "name": item["name"], "arguments": item["arguments"]}]
