"""A registry that speaks as much of the distribution API as a pull needs, and images made of the node's own busybox."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.images.sif import this_architecture

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"


def need_builder() -> None:
    """Skip, with the reason, where no image can be built."""
    try:
        find_binary()
    except SandboxError as error:
        pytest.skip(f"no image can be built on this machine: {error}")
    if shutil.which("busybox") is None:
        pytest.skip("no image can be built on this machine: busybox-static is not installed")


def layer(content: dict[str, str]) -> bytes:
    """A tar with busybox, its links, and text files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "etc", "tmp", "proc", "sys", "dev", "root", "usr", "var", "opt"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(shutil.which("busybox") or "", arcname="bin/busybox")
        for applet in (
            "sh",
            "cat",
            "cp",
            "mkdir",
            "rm",
            "echo",
            "ls",
            "chmod",
            "dirname",
            "tar",
            "test",
            "pwd",
            "true",
        ):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for name, text in {
            "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
            "etc/group": "root:x:0:\n",
            **content,
        }.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(text.encode()), 0o644
            tar.addfile(file, io.BytesIO(text.encode()))
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def image_config(data: bytes) -> bytes:
    return json.dumps(
        {
            "architecture": this_architecture(),
            "os": "linux",
            "config": {"Env": ["PATH=/bin:/usr/bin"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(data)]},
        }
    ).encode()


def write_docker_archive(path: Path, content: dict[str, str]) -> None:
    """What ``docker save`` writes."""
    data = layer(content)
    config = image_config(data)
    manifest = [{"Config": "config.json", "RepoTags": ["made:here"], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for name, blob in (
            ("config.json", config),
            ("layer.tar", data),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(blob)
            tar.addfile(entry, io.BytesIO(blob))


class Registry(ThreadingHTTPServer):
    """On 127.0.0.1. ``gate`` holds layers back while it is closed; ``pulled`` counts the layers that went out."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.layers: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        """Somebody wants a layer."""
        self.pulled: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that a killed builder left is no news; what else breaks, the pull will tell."""

    def add(self, name: str, content: dict[str, str]) -> str:
        """Serve an image as ``name``; returns its reference."""
        data = layer(content)
        config = image_config(data)
        self.blobs |= {digest_of(data): data, digest_of(config): config}
        self.layers.add(digest_of(data))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(config), "digest": digest_of(config)},
            "layers": [{"mediaType": LAYER, "size": len(data), "digest": digest_of(data)}],
        }
        self.manifests[name] = json.dumps(manifest).encode()
        return f"docker://127.0.0.1:{self.server_port}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["v2"]:
            self._answer(200, "application/json", b"{}")
        elif "manifests" in parts:
            self._manifest("/".join(parts[1:-2]), parts[-1])
        elif "blobs" in parts and parts[-1] in self.server.blobs:
            if parts[-1] in self.server.layers:
                self.server.asked.set()
                self.server.gate.wait(60)
                self.server.pulled.append(parts[-1])
            self._answer(200, "application/octet-stream", self.server.blobs[parts[-1]])
        else:
            self._answer(404, "application/json", b'{"errors":[{"code":"NAME_UNKNOWN"}]}')

    do_HEAD = do_GET

    def _manifest(self, name: str, reference: str) -> None:
        found = self.server.manifests.get(name if reference.startswith("sha256:") else f"{name}:{reference}")
        found = found or next((m for m in self.server.manifests.values() if digest_of(m) == reference), None)
        if found is None:
            self._answer(
                404, "application/json", b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
            )
        else:
            self._answer(200, MANIFEST, found)

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if kind == MANIFEST:
            self.send_header("Docker-Content-Digest", digest_of(body))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # who asked was killed meanwhile
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Registry]:
    registry = Registry()
    thread = threading.Thread(target=registry.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield registry
    finally:
        registry.gate.set()
        registry.shutdown()
        thread.join()
        registry.server_close()
