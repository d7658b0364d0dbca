"""One copy of an image per node: shared by its workers, checked, and gone after the last of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import image_registry
import pytest
from test_image_cache import put, sif_bytes

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images import node_copy
from prorl_hpc.sandbox.images.building import BuildOptions, build
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.definitions import load_definition
from prorl_hpc.sandbox.images.node_copy import NodeImages, sweep_copies

ALWAYS = SandboxConfig(copy_images="always")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    return ImageCache()


def runtime_dir(tmp_path: Path, run: str = "run") -> Path:
    path = tmp_path / f"prorl-{os.getuid()}-{run}"
    path.mkdir(exist_ok=True)
    return path


def test_workers_of_a_node_share_one_copy_and_the_last_removes_it(cache: ImageCache, tmp_path: Path) -> None:
    put(cache)
    place = runtime_dir(tmp_path)
    workers = [NodeImages(ALWAYS, place) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda worker: worker.get("one"), workers))
    (copy,) = paths
    assert copy.is_relative_to(place) and copy.read_bytes() == cache.path("one").read_bytes()
    for worker in workers[:-1]:
        worker.close()
        assert copy.exists()
    workers[-1].close()
    assert list(place.iterdir()) == []


def test_a_copy_is_made_only_where_it_helps(cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache)
    place = runtime_dir(tmp_path)
    assert NodeImages(SandboxConfig(), place).get("one") == cache.path("one")  # a local disk
    monkeypatch.setattr(node_copy, "is_network", lambda path: True)
    assert NodeImages(SandboxConfig(copy_images="never"), place).get("one") == cache.path("one")
    worker = NodeImages(SandboxConfig(), place)
    assert worker.get("one") != cache.path("one")
    worker.close()


def test_an_image_outside_the_cache_is_copied_too(cache: ImageCache, tmp_path: Path) -> None:
    (tmp_path / "mine.sif").write_bytes(sif_bytes())
    worker = NodeImages(ALWAYS, runtime_dir(tmp_path))
    assert worker.get(str(tmp_path / "mine.sif")).read_bytes() == sif_bytes()
    worker.close()


def test_a_damaged_image_is_not_started(cache: ImageCache, tmp_path: Path) -> None:
    put(cache)
    content = bytearray(cache.path("one").read_bytes())
    content[-5] ^= 1
    cache.path("one").write_bytes(content)
    worker = NodeImages(ALWAYS, runtime_dir(tmp_path))
    with pytest.raises(SandboxError, match=r"another checksum.*image verify one"):
        worker.get("one")
    worker.close()
    assert list(runtime_dir(tmp_path).iterdir()) == []


def test_without_room_it_starts_from_afar_unless_a_copy_is_asked_for(
    cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_copy, "_copy_checked", full)
    monkeypatch.setattr(node_copy, "is_network", lambda path: True)
    assert NodeImages(SandboxConfig(), runtime_dir(tmp_path)).get("one") == cache.path("one")
    with pytest.raises(SandboxError, match=r"No space left on device.*run.runtime_root"):
        NodeImages(ALWAYS, runtime_dir(tmp_path)).get("one")


def _hold(place: Path, ready: multiprocessing.synchronize.Event) -> None:
    NodeImages(ALWAYS, place).get("one")
    ready.set()
    signal.pause()


def test_what_a_killed_worker_left_is_swept_and_what_is_in_use_is_not(cache: ImageCache, tmp_path: Path) -> None:
    put(cache)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    dead, mine = runtime_dir(tmp_path, "dead"), runtime_dir(tmp_path, "mine")
    holder = context.Process(target=_hold, args=(dead, ready))
    holder.start()
    assert ready.wait(30)
    assert sweep_copies(mine) == [] and list((dead / "images").iterdir())
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    assert len(sweep_copies(mine)) == 1
    assert list(dead.iterdir()) == []


@pytest.mark.apptainer
def test_a_copy_can_be_a_directory(cache: ImageCache, tmp_path: Path) -> None:
    image_registry.need_builder()
    build(cache, "tiny", load_definition("tiny"), lambda line: None, BuildOptions())
    place = runtime_dir(tmp_path)
    workers = [NodeImages(SandboxConfig(unpack_images=True), place) for _ in range(2)]
    first, second = (worker.get("tiny") for worker in workers)
    assert first == second and (first / ".singularity.d").is_dir() and (first / "bin" / "busybox").is_file()
    for worker in workers:
        worker.close()
    assert list(place.iterdir()) == []


def test_no_link_to_copies_is_followed(cache: ImageCache, tmp_path: Path) -> None:
    """Another user can put one beside this run's directory."""
    put(cache)
    mine, elsewhere = runtime_dir(tmp_path, "mine"), tmp_path / "elsewhere"
    copy = elsewhere / "images" / "a"
    copy.mkdir(parents=True)
    (copy / "lock").touch()
    (tmp_path / f"prorl-{os.getuid()}-link").symlink_to(elsewhere)
    assert sweep_copies(mine) == [] and (copy / "lock").exists()


def test_a_removal_of_a_copy_that_was_cut_short_is_swept(cache: ImageCache, tmp_path: Path) -> None:
    mine, other = runtime_dir(tmp_path, "mine"), runtime_dir(tmp_path, "other")
    gone = other / "images" / "gone-1"
    (gone / "image").mkdir(parents=True)
    (gone / "lock").touch()
    assert sweep_copies(mine) == [gone] and list(other.iterdir()) == []
