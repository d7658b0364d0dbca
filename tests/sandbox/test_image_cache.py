"""The cache and its lock, without any builder: a SIF is written by hand."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import struct
import threading
import time
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images import entry_lock as locking
from prorl_hpc.sandbox.images.cache import Entry, ImageCache
from prorl_hpc.sandbox.images.entry_lock import entry_lock, lock_path
from prorl_hpc.sandbox.images.resolving import check, find, resolve
from prorl_hpc.sandbox.images.sif import check_sif, this_architecture

ARCHITECTURES = {"amd64": b"02\0", "arm64": b"04\0"}


def sif_bytes(architecture: str = "", filling: bytes = b"x" * 1000) -> bytes:
    """A SIF of one squashfs partition, as far as its header goes."""
    code = ARCHITECTURES[architecture or this_architecture()]
    body = b"hsqs".ljust(40, b"\0") + struct.pack("<q", 96 + len(filling))
    body = body.ljust(96, b"\0") + filling
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!/bin/sh", b"SIF_MAGIC\0", b"01\0", code, b"", 0, 0, 47, 48, 4096, 585 * 48, 36864, 0
    )
    entry = struct.pack("<i?III7q", 0x4004, True, 1, 1, 0, 36864, len(body), len(body), 0, 0, 0, 0)
    entry = (entry + b"rootfs".ljust(128, b"\0") + struct.pack("<ii3s", 1, 2, code)).ljust(585, b"\0")
    return (header.ljust(4096, b"\0") + entry).ljust(36864, b"\0") + body


def quiet(text: str) -> None:
    pass


def put(cache: ImageCache, name: str = "one", content: bytes = b"") -> Entry:
    with cache.making(name, quiet) as aside:
        aside.write_bytes(content or sif_bytes())
        return cache.publish(
            aside, name, reference=f"docker://docker.io/library/{name}:latest", kind="docker", built_by="test"
        )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(locking, "POLL_S", 0.02)
    return ImageCache()


def test_what_is_published_is_found_and_sound(cache: ImageCache) -> None:
    entry = put(cache)
    assert cache.find("one") == entry == cache.verify("one")
    assert cache.entries() == [entry]
    assert sorted(path.name for path in cache.directory.iterdir()) == ["one.json", "one.sif"]


def test_a_sif_is_known_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "image.sif"
    whole = sif_bytes("arm64")
    path.write_bytes(whole)
    assert check_sif(path).architecture == "arm64"
    with pytest.raises(SandboxError, match="is for arm64, and this machine is amd64"):
        check_sif(path, "amd64")
    for content, word in (
        (b"", "is empty"),
        (b"#!/bin/sh\n" * 100, "its magic is missing"),
        (whole[:5000][:4200], "cut short within its header"),
        (whole[:-1], "was cut short"),
        (whole.replace(b"hsqs", b"\0\0\0\0"), "no sound superblock"),
        (whole[:4096] + bytes(len(whole) - 4096), "no root file system"),
    ):
        path.write_bytes(content)
        with pytest.raises(SandboxError, match=word) as caught:
            check_sif(path)
        assert "image verify" in str(caught.value)
    with pytest.raises(SandboxError, match="does not exist"):
        check_sif(tmp_path / "absent.sif")


def test_damage_is_found_and_the_cure_named(cache: ImageCache) -> None:
    put(cache)
    path = cache.path("one")
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    assert cache.find("one") is not None  # the size is right: only reading it tells
    with pytest.raises(SandboxError, match=r"another checksum.*\n?.*prorl-hpc image pull --force docker://"):
        cache.verify("one")
    path.write_bytes(content[:-100])
    assert cache.find("one") is None
    with pytest.raises(SandboxError, match="was cut short"):
        cache.verify("one")


def test_what_is_not_a_sif_is_not_published(cache: ImageCache) -> None:
    with pytest.raises(SandboxError, match="magic is missing"):
        put(cache, "one", b"<html>not found</html>" * 10)
    assert list(cache.directory.iterdir()) == []


def test_an_image_without_its_description_is_not_there(cache: ImageCache) -> None:
    put(cache)
    (cache.directory / "one.json").write_text("{")
    assert cache.find("one") is None and cache.names() == ["one"]
    with pytest.raises(SandboxError, match="not made whole"):
        cache.verify("one")
    put(cache)
    assert cache.find("one") is not None


def test_a_failed_making_leaves_nothing(cache: ImageCache) -> None:
    with pytest.raises(RuntimeError), cache.making("one", quiet) as aside:
        aside.write_bytes(b"half")
        raise RuntimeError
    assert list(cache.directory.iterdir()) == []


def _hold_for_ever(directory: Path, ready: multiprocessing.synchronize.Event) -> None:
    with entry_lock(directory, "one", quiet) as aside:
        aside.write_bytes(b"half an image")
        ready.set()
        time.sleep(600)


def test_the_lock_of_a_killed_process_is_broken_and_what_it_wrote_removed(cache: ImageCache) -> None:
    cache.directory.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold_for_ever, args=(cache.directory, ready))
    holder.start()
    assert ready.wait(30)
    assert cache.is_being_made("one") and cache.sweep() == []
    os.kill(holder.pid or 0, signal.SIGKILL)
    said: list[str] = []
    with cache.making("one", said.append):  # not even reaped yet
        assert not list(lock_path(cache.directory, "one").glob("*.sif"))
    holder.join()
    assert list(cache.directory.iterdir()) == []


def test_the_second_waits_for_the_first(cache: ImageCache) -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with cache.making("one", quiet):
            order.append("first in")
            inside.set()
            leave.wait(20)
            order.append("first out")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        leave.set()

    with cache.making("one", hear):
        order.append("second in")
    thread.join()
    assert order == ["first in", "first out", "second in"]
    assert f"process {os.getpid()}" in said[0]


def _foreign_lock(cache: ImageCache, beat: str) -> Path:
    """Of a process on another node."""
    lock = lock_path(cache.directory, "one")
    lock.mkdir(parents=True)
    owner = {"token": "theirs", "host": "node7", "boot": "another", "pid": 1, "started": "5"}
    (lock / "owner.json").write_text(json.dumps(owner))
    (lock / "beat-theirs").write_text(beat)
    return lock


def test_an_owner_on_another_node_is_dead_when_its_beat_stops(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "STALE_S", 0.2)
    _foreign_lock(cache, "1")
    said: list[str] = []
    with cache.making("one", said.append):
        pass
    assert any("process 1 on node7 died over it" in text for text in said)


def test_an_owner_on_another_node_lives_while_it_beats(cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "STALE_S", 0.5)
    lock = _foreign_lock(cache, "1")
    stop = threading.Event()

    def beat() -> None:
        for number in range(2, 60):
            (lock / "beat-theirs").write_text(str(number))
            time.sleep(0.03)
        stop.set()

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(SandboxError, match="stopped while waiting"), cache.making("one", quiet, stop):
        pass
    thread.join()
    assert lock.exists()


def test_who_was_taken_for_dead_publishes_nothing(cache: ImageCache) -> None:
    with pytest.raises(SandboxError, match="taken over"), cache.making("one", quiet) as aside:
        aside.write_bytes(sif_bytes())
        locking.remove_aside(lock_path(cache.directory, "one"))
        put(cache, "one", sif_bytes(filling=b"theirs"))
        cache.publish(aside, "one", reference="x", kind="docker", built_by="test")
    assert cache.verify("one").size == len(sif_bytes(filling=b"theirs"))


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ImageCache(tmp_path / "file" / "images")
    with pytest.raises(SandboxError, match="PRORL_HOME"), cache.making("one", quiet):
        pass


def test_images_are_resolved(cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = put(cache, "python-latest-0db442a313")
    path = cache.path(entry.name)
    for text in ("docker://python", "docker://docker.io/library/python:latest", "python", "python:latest", entry.name):
        assert resolve(text) == path, text
        assert find(text)[1] == entry
    assert resolve(str(path)) == path and find(str(path))[1] is None
    box = tmp_path / "directory"
    (box / ".singularity.d").mkdir(parents=True)
    assert resolve(str(box)) == box
    monkeypatch.chdir(tmp_path)
    assert resolve("directory") == box
    check("host")
    check("docker://python")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("docker://debian:12", "prorl-hpc image pull docker://docker.io/library/debian:12"),
        ("org/tool:3", "prorl-hpc image pull docker://org/tool:3"),
        ("base", "prorl-hpc image build base"),
        ("codign", "did you mean 'coding'"),
        ("pythn-latest-0db442a313", "did you mean 'python-latest-0db442a313'"),
        ("/no/such.sif", "/no/such.sif does not exist on this node"),
        ("/tmp", "it has no .singularity.d"),
        ("NO WAY", "is no file, no name"),
        ("ftp://x", "not from ftp://"),
    ],
)
def test_what_is_not_there_says_how_to_get_it(cache: ImageCache, image: str, words: str) -> None:
    put(cache, "python-latest-0db442a313")
    with pytest.raises(SandboxError) as caught:
        check(image)
    assert words in str(caught.value)


def test_an_image_for_another_machine_is_refused_where_it_would_run(cache: ImageCache) -> None:
    other = "arm64" if this_architecture() == "amd64" else "amd64"
    put(cache, "one", sif_bytes(other))
    check("one")  # a login node of another kind is no reason to refuse
    with pytest.raises(SandboxError, match=f"is for {other}"):
        resolve("one")


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "image.sif")
    with pytest.raises(SandboxError, match="neither a file nor a sandbox directory"):
        check_sif(tmp_path / "image.sif")


def test_what_the_file_system_refuses_is_told(cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    put(cache)
    with monkeypatch.context() as patched, pytest.raises(SandboxError, match=r"one cannot be removed: .*Read-only"):
        patched.setattr(Path, "unlink", refuse)
        cache.remove("one")
    with cache.making("two", print) as aside, monkeypatch.context() as patched:
        aside.write_bytes(cache.path("one").read_bytes())
        patched.setattr(Path, "chmod", refuse)
        with pytest.raises(SandboxError, match=r"two cannot be put .*Read-only"):
            cache.publish(aside, "two", reference="r", kind="docker", built_by="b")
