"""What the HTTP face itself counts. Paths are labelled by their pattern, so ids make no new series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest


class HttpMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "prorl_http_answers", "Calls answered", ["method", "path", "status"], registry=self._registry
        )
        self._refusals = Counter("prorl_http_refusals", "Calls refused, by code", ["code"], registry=self._registry)

    def answered(self, method: str, path: str, status: int) -> None:
        self._answers.labels(method, path, str(status)).inc()

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
