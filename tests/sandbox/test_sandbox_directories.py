"""What is swept, what is left alone, and that everything can be removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.directories import MARKER, Holding, remove_tree
from prorl_hpc.sandbox.host_image import make_host_image
from prorl_hpc.sandbox.leftovers import (
    in_session,
    kill_marked,
    left_of_session,
    marked_processes,
    mounts_below,
    record_session,
    sweep,
)


def die(holding: Holding) -> None:
    """What the kernel does when the holder's process ends."""
    os.close(holding._lock)


def test_only_holdings_of_the_dead_are_swept(tmp_path: Path) -> None:
    mine, other = tmp_path / "prorl-mine", tmp_path / f"prorl-{os.getuid()}-other"
    dead, beside, alive = Holding(mine), Holding(other), Holding(mine)
    dead.make_box()
    (tmp_path / f"prorl-{os.getuid()}-other" / "vllm.sock").touch()
    for stranger in (mine / "not-ours", tmp_path / "unrelated" / "sb-1-0", mine / "sb-no-lock"):
        stranger.mkdir(parents=True)
    shutil.copytree(dead.path, tmp_path / "unrelated" / "sb-2-0")
    die(dead)
    die(beside)
    assert set(sweep(mine)) == {dead.path, beside.path}
    assert alive.path.is_dir() and (mine / "not-ours").is_dir() and (mine / "sb-no-lock").is_dir()
    assert (tmp_path / "unrelated" / "sb-2-0").is_dir() and (other / "vllm.sock").exists()
    assert sweep(mine) == []
    alive.release()


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "sb-1-0"
    target.mkdir(parents=True)
    (target / "holder.lock").touch()
    runtime_dir = tmp_path / "prorl-x"
    runtime_dir.mkdir()
    (runtime_dir / "sb-1-0").symlink_to(target)
    (tmp_path / f"prorl-{os.getuid()}-y").symlink_to(target.parent)
    assert sweep(runtime_dir) == [] and target.is_dir()


def test_processes_are_known_by_the_whole_name(tmp_path: Path) -> None:
    box, longer = tmp_path / "sb-1-0", tmp_path / "sb-1-01"
    ours, below, not_ours = (
        subprocess.Popen(["sleep", "60"], env={MARKER: str(path)}) for path in (box, box / "abc", longer)
    )
    assert {p.pid for p in marked_processes(box)} == {ours.pid, below.pid}
    assert kill_marked(box) == sorted([ours.pid, below.pid])
    assert ours.poll() is not None and below.poll() is not None and not_ours.poll() is None
    not_ours.kill()
    not_ours.wait(10)


def test_any_modes_are_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "a" / "b" / "c").mkdir(parents=True)
    (tree / "a" / "b" / "f").touch()
    (tree / "a" / "up").symlink_to(outside)
    for directory in (tree / "a" / "b" / "c", tree / "a" / "b", tree / "a", tree):
        directory.chmod(0)
    remove_tree(tree)
    assert not tree.exists() and (outside / "kept").exists()
    remove_tree(tree)


def test_any_depth_and_any_names_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    below = os.open(tree, os.O_RDONLY)
    for _ in range(3000):  # deeper than Python's stack, the open files and the longest path
        os.mkdir("d", dir_fd=below)
        deeper = os.open("d", os.O_RDONLY, dir_fd=below)
        os.close(below)
        below = deeper
    os.close(below)
    for number in range(0, 40, 2):
        (tree / f".removed-{number}" / "in" / "it").mkdir(parents=True)
    for number in range(1, 40, 2):
        (tree / f".removed-{number}").touch()
    remove_tree(tree)
    assert not tree.exists()


def test_boxes_have_short_names_of_their_own(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    box, other = holding.make_box(), holding.make_box()
    assert box.path != other.path
    assert len(str(box.socket)) - len(str(tmp_path)) <= 32
    assert (box.path.stat().st_mode & 0o777, holding.path.stat().st_mode & 0o777) == (0o700, 0o700)
    holding.release()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_path_that_is_too_long_is_told_of(tmp_path: Path) -> None:
    holding = Holding(tmp_path / ("long" * 25))
    with pytest.raises(SandboxError, match=r"the kernel takes 107: choose a shorter run\.runtime_root"):
        holding.make_box()
    holding.release()


def test_the_host_image_borrows_and_tells_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("usr/bin", "etc", "lib"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc" / "passwd").write_text("alice:x:1000:1000::/home/alice:/bin/sh\n")
    (root / "etc" / "hosts").write_text("10.0.0.1 secret\n")
    binds = make_host_image(tmp_path / "image", root)
    assert binds == ["/usr", "/lib"]
    assert (tmp_path / "image" / "bin").readlink() == Path("usr/bin")
    assert (tmp_path / "image" / "etc" / "hosts").read_text() == ""
    assert "alice" not in (tmp_path / "image" / "etc" / "passwd").read_text()


def test_what_cannot_be_swept_is_told_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process in uninterruptible sleep, say: it must not keep a worker from starting."""
    left = Holding(tmp_path / "run")
    os.close(left._lock)

    def refuse(path: Path) -> list[int]:
        raise SandboxError("the processes [1] do not end")

    monkeypatch.setattr("prorl_hpc.sandbox.leftovers.kill_marked", refuse)
    assert sweep(tmp_path / "run") == []
    assert f"what a dead process left in {left.path} is not swept: the processes [1] do not end" in caplog.text


@pytest.mark.parametrize("files", [[], ["lock.new"]])
def test_a_holding_whose_maker_was_killed_is_swept_when_it_is_old(tmp_path: Path, files: list[str]) -> None:
    fresh, old, not_ours = (tmp_path / "run" / name for name in ("sb-1-0", "sb-2-0", "sb-3-0"))
    for path in (fresh, old, not_ours):
        path.mkdir(parents=True)
        for name in files:
            (path / name).touch()
    (not_ours / "something").mkdir()
    for path in (old, not_ours):
        os.utime(path, (1e9, 1e9))
    assert sweep(tmp_path / "run") == [old]
    assert fresh.is_dir() and (not_ours / "something").is_dir()


def test_a_removal_that_was_cut_short_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kill, at any of its steps: the lock is there until nothing else is."""
    holding = Holding(tmp_path)
    for _ in range(3):
        (holding.make_box().workspace / "file").touch()
    for number in range(4):
        (holding.path / f"a{number}").touch()
    there = set()

    def look(name: str, **options: object) -> None:
        names = [path.name for path in holding.path.iterdir()]
        there.add(("holder.lock" in names, len(names) > 1))
        remove(name, **options)

    remove = os.unlink
    monkeypatch.setattr(os, "unlink", look)
    holding.release()
    assert there == {(True, True), (True, False)} and not holding.path.exists()


def test_a_session_whose_number_came_to_another_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        assert in_session(other.pid, 4e9) == [other.pid]
        assert left_of_session(other.pid, 4e9) == []
        other.kill()


def test_mounts_are_found_whatever_the_path_is_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a b\\ü\udcff"
    line = os.fsencode(str(path)).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"proc /proc proc rw 0 0\ntmpfs " + line + b"/in tmpfs rw 0 0\n")
    assert mounts_below(path) == [str(path / "in")]


def test_a_path_that_is_no_path_is_told(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"File name too long.*run\.runtime_root chooses another place"):
        Holding(tmp_path / ("x" * 300))


@pytest.mark.parametrize("first_lives", [True, False])
def test_what_a_launcher_became_is_swept_by_its_session(tmp_path: Path, first_lives: bool) -> None:
    """It keeps nothing of its environment, and waits for ever when its worker was killed while it started."""
    holding = Holding(tmp_path / "run")
    box = holding.make_box()
    for name in ("starter", "bystander"):
        shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    script = f"{tmp_path}/starter 60 & {tmp_path}/bystander 60 & echo $!; {'wait' if first_lives else 'read x'}"
    argv = ["sh", "-c", script]
    with subprocess.Popen(argv, start_new_session=True, stdin=-1, stdout=-1, text=True, env={}) as first:
        assert first.stdin and first.stdout
        bystander = int(first.stdout.readline())
        record_session(box, first.pid)
        if not first_lives:
            first.stdin.close()
            first.wait(10)
        before = in_session(first.pid, 4e9)
        die(holding)
        assert sweep(tmp_path / "run") == [holding.path]
        left = in_session(first.pid, 4e9)
    assert len(before) == 2 + first_lives and left == ([] if first_lives else [bystander])
    if left:
        os.kill(bystander, signal.SIGKILL)
