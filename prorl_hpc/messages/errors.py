"""The error model.

    ProrlError                  anything this package raises on purpose; the message is for a person
    ├── ConfigError             what was asked for cannot be: found before anything is allocated
    │   └── DatasetError        a row that does not parse: file, line, field
    ├── RunError                the run cannot go on: a process died, a limit was passed
    ├── SandboxError            a sandbox or its tool server broke (not: a command that failed)
    ├── InferenceError          an LLM server broke or answered without ids or logprobs
    ├── TransportError          a peer is gone, a key is wrong, a path is too long
    └── ServiceError            the coordinator's HTTP API refused; carries ``code`` and ``status``

A rollout that breaks is data (messages.rollout.Failure), not one of these.
A message says what happened, what was given, what is allowed, what to do next.
"""

from __future__ import annotations


class ProrlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(ProrlError):
    """The configuration or the machine cannot do what was asked."""


class DatasetError(ConfigError):
    """A dataset row does not parse."""


class RunError(ProrlError):
    """The run cannot go on."""


class SandboxError(ProrlError):
    """A sandbox broke."""


class InferenceError(ProrlError):
    """An LLM server broke."""


class TransportError(ProrlError):
    """A channel between processes broke."""


class ServiceError(ProrlError):
    """The rollout service refused a call."""

    def __init__(self, message: str, *, code: str = "error", status: int = 500) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
