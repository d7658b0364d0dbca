"""Bring images into the cache: pull a reference, build a definition or a Dockerfile. Through spython, in a process of
its own (builder_process), so that it has a time limit, shows its progress, and a failure is an error with its reason.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.images.archives import check_archive
from prorl_hpc.sandbox.images.builder_error import HALF_INDEX, BuilderError
from prorl_hpc.sandbox.images.cache import Entry, ImageCache, Progress
from prorl_hpc.sandbox.images.definitions import Definition
from prorl_hpc.sandbox.images.references import Reference

QUIET_S = 30.0
"""After so long without a line from the builder, progress says that it is at work."""
_END_S = 15.0
_INDEX_TRIES = 6
_DIRECT = ("library", "oras", "https", "http")
"""Already a SIF where they come from: spython's pull fetches them as they are; all others are built from layers."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to run the builder."""

    timeout_s: float = 3600.0
    no_https: bool = False
    """The registry speaks plain http."""
    fakeroot: bool = True
    """For definitions: act as root within the build."""
    force: bool = False
    """Make it although it is there."""
    flags: tuple[str, ...] = ()
    """For the builder itself, as they are."""


def pull(
    cache: ImageCache,
    reference: Reference,
    progress: Progress,
    options: BuildOptions,
    stop: threading.Event | None = None,
) -> tuple[Entry, bool]:
    """The entry, and whether it was made now. Two pulls of one reference at once are one pull; the second waits."""
    name = reference.cache_name
    found = cache.find(name)
    if found and not options.force:
        return found, False
    check_archive(reference)
    binary, version = builder()
    with cache.making(name, progress, stop) as aside:
        made_meanwhile = cache.find(name)
        if made_meanwhile and made_meanwhile != found:
            return made_meanwhile, False
        flags = ["--no-https"] if options.no_https and reference.kind not in _DIRECT else []
        flags += options.flags
        what = "pull" if reference.kind in _DIRECT else "build"
        request = {"what": what, "binary": binary, "source": str(reference), "target": str(aside), "options": flags}
        _pull_layers(request, progress, options.timeout_s, stop or threading.Event(), f"the pull of {reference}")
        labels = inspect_labels(aside, binary, progress)
        entry = cache.publish(
            aside, name, reference=str(reference), kind=reference.kind, built_by=version, labels=labels
        )
    return entry, True


def build(
    cache: ImageCache, name: str, definition: Definition, progress: Progress, options: BuildOptions
) -> tuple[Entry, bool]:
    """Build a definition as ``name``; an image of that name from another definition is replaced only with ``force``."""
    digest = hashlib.sha256(definition.text.encode()).hexdigest()
    found = cache.find(name)
    if found and not options.force:
        return _same(cache, found, digest), False
    binary, version = builder()
    with cache.making(name, progress) as aside:
        made_meanwhile = cache.find(name)
        if made_meanwhile and made_meanwhile != found:
            return _same(cache, made_meanwhile, digest), False
        text = aside.with_suffix(".def")
        try:
            text.write_text(definition.text)
        except OSError as error:
            raise SandboxError(f"{text} cannot be written: {error}; make room, or set $PRORL_HOME") from error
        flags = [*(["--fakeroot"] if options.fakeroot else []), *options.flags]
        request = {"what": "build", "binary": binary, "source": str(text), "target": str(aside), "options": flags}
        run_builder(
            request,
            progress,
            options.timeout_s,
            directory=definition.directory,
            subject=f"the build of {definition.source}",
        )
        labels = inspect_labels(aside, binary, progress)
        entry = cache.publish(
            aside,
            name,
            reference=definition.source,
            kind=definition.kind,
            built_by=version,
            source_sha256=digest,
            labels=labels,
        )
    return entry, True


def _pull_layers(
    request: dict[str, Any], progress: Progress, timeout_s: float, stop: threading.Event, subject: str
) -> None:
    """Pulls of different images share Apptainer's cache of layers, whose index is written in place (1.4): who reads it just
    then finds half of it. Nothing is lost by asking again."""
    for number in range(1, _INDEX_TRIES + 1):
        try:
            return run_builder(request, progress, timeout_s, stop, subject=subject)
        except SandboxError as error:
            if HALF_INDEX not in str(error) or number == _INDEX_TRIES:
                raise
        progress("another pull was writing the index of the builder's layers: again")
        stop.wait(number * random.random())
    raise AssertionError("unreachable: the last try returns or raises")


def _same(cache: ImageCache, entry: Entry, digest: str) -> Entry:
    if entry.source_sha256 != digest:
        raise SandboxError(
            f"there is an image {entry.name} in {cache.directory} already, from {entry.reference} as it was then: --force "
            "builds it again, --name NAME makes another"
        )
    return entry


def builder() -> tuple[str, str]:
    """Apptainer's or Singularity's binary, and its version. SandboxError when there is none."""
    binary = find_binary()
    done = subprocess.run([binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise SandboxError(f"`{binary} --version` ended with exit code {done.returncode}: {done.stderr.strip()}")
    return binary, done.stdout.strip().replace(" version ", " ")


def inspect_labels(path: Path, binary: str, progress: Progress) -> dict[str, str]:
    """The image's labels. What cannot be mounted on this node cannot be inspected here: told, and no labels."""
    lines: list[str] = []
    try:
        run_builder({"what": "inspect", "binary": binary, "source": str(path)}, lines.append, 120.0)
        found = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        labels = found["attributes"]["labels"]
        return {str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {}
    except (SandboxError, ValueError, KeyError, StopIteration) as error:
        progress(f"the image was made, but its labels cannot be read on this node: {str(error).splitlines()[0]}")
        return {}


def run_builder(
    request: dict[str, Any],
    progress: Progress,
    timeout_s: float,
    stop: threading.Event | None = None,
    directory: Path | None = None,
    subject: str = "",
) -> None:
    """Run one request of builder_process; BuilderError with its last lines when it fails, or is stopped."""
    command = [sys.executable, "-m", "prorl_hpc.sandbox.images.builder_process", json.dumps(request)]
    packages = str(Path(__file__).parents[3])  # it is started in the definition's directory, where %files are
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # never written: its end tells the builder that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=directory,
        env=env,
    )
    last: collections.deque[str] = collections.deque(maxlen=15)
    try:
        why = _follow(process, progress, last, time.monotonic() + timeout_s, stop)
    finally:
        _end(process)
    said = "\n".join(line for line in last if line.strip()) or "(it said nothing)"
    what = subject or f"the {request['what']} of {request['source']}"
    if why:
        raise BuilderError(f"{what} {why}{f' of {timeout_s:.0f} s (--timeout)' if 'limit' in why else ''}", said)
    if process.returncode != 0:
        raise BuilderError(f"{what} failed (exit code {process.returncode})", said, hinted=True)


def _follow(
    process: subprocess.Popen[bytes],
    progress: Progress,
    last: collections.deque[str],
    deadline: float,
    stop: threading.Event | None,
) -> str:
    """Hand on its lines until it closes its output; returns why it has to be ended, or nothing."""
    assert process.stdout is not None
    started = spoke = time.monotonic()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if stop is not None and stop.is_set():
                return "was stopped"
            now = time.monotonic()
            if now > deadline:
                return "passed its time limit"
            if now - spoke > QUIET_S:
                progress(f"still at work ({now - started:.0f} s)")
                spoke = now
            if not selector.select(timeout=0.5):
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
            if not chunk:
                lines, rest = [rest], b""
            for line in filter(None, (line.decode(errors="replace").rstrip() for line in lines)):
                last.append(line)
                progress(line)
                spoke = now
            if not chunk:
                process.wait()
                return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the builder and all of its process group; a no-op when it has ended by itself."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # its end of input: it asks its group to end, and tidies up
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
