"""The run's secrets: CURVE key pairs for ZeroMQ and the bearer token of the HTTP API.

Files in ``<run>/keys`` (0700), each 0600, made once by ``create`` before anything is submitted.
Servers hold one key pair of the run, clients another; a server lets in only the run's client key.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq

from prorl_hpc.messages.errors import TransportError

_NAMES = ("server.public", "server.secret", "client.public", "client.secret")


@dataclass(frozen=True)
class RunKeys:
    """Z85-encoded CURVE keys and the API token. Never printed."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    api_token: str

    def __repr__(self) -> str:
        return "RunKeys(…)"

    @classmethod
    def create(cls, directory: Path) -> RunKeys:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        values = dict(zip(_NAMES, (server_public, server_secret, client_public, client_secret), strict=True))
        values["api-token"] = secrets.token_urlsafe(32).encode()
        for name, value in values.items():
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as f:
                f.write(value)
        return cls.load(directory)

    @classmethod
    def load(cls, directory: Path) -> RunKeys:
        parts = []
        for name in (*_NAMES, "api-token"):
            path = directory / name
            try:
                if path.stat().st_mode & 0o077:
                    raise TransportError(f"{path} is readable by others: it must have mode 0600 (chmod 600 {path})")
                parts.append(path.read_bytes())
            except FileNotFoundError as error:
                raise TransportError(f"the key file {path} is missing: this is not a complete run directory") from error
        return cls(parts[0], parts[1], parts[2], parts[3], parts[4].decode())
