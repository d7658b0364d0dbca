"""All images of a dataset: resumed, some at a time, failures told and the rest done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_registry
import pytest
from image_registry import Registry

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images import building, conversion
from prorl_hpc.sandbox.images.building import BuildOptions
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.conversion import Report, convert
from prorl_hpc.sandbox.images.reference_lists import read_references

pytestmark = pytest.mark.apptainer


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    image_registry.need_builder()
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "layers"))
    monkeypatch.setattr(conversion, "RETRY_S", 0.05)
    with image_registry.serving() as serving:
        yield serving


@pytest.fixture
def dataset(registry: Registry, tmp_path: Path) -> Path:
    """Three images in four rows, one of them twice, and one that is nowhere."""
    references = [registry.add(f"data/{name}:1", {"opt/name": name}) for name in ("one", "two", "three")]
    host = f"docker://127.0.0.1:{registry.server_port}"
    rows = [*references, references[0], f"{host}/data/absent:1"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"id": n, "docker_image": text}) + "\n" for n, text in enumerate(rows)))
    return file


def run(file: Path, said: list[str], tries: int = 1) -> Report:
    return convert(
        ImageCache(),
        read_references(file),
        at_a_time=2,
        tries=tries,
        options=BuildOptions(timeout_s=120),
        report_path=file.with_name("report.json"),
        tell=said.append,
    )


def test_a_dataset_is_converted_and_a_second_run_does_only_what_failed(registry: Registry, dataset: Path) -> None:
    said: list[str] = []
    report = run(dataset, said)
    assert report.counts == {"done": 3, "skipped": 0, "failed": 1, "not started": 0}, report.outcomes
    written = json.loads(dataset.with_name("report.json").read_text())
    assert written["counts"] == report.counts
    failed = [image for image in written["images"] if image["state"] == "failed"]
    assert [image["reference"].split("/")[-1] for image in failed] == ["absent:1"]
    assert "no such image or tag" in failed[0]["reason"]
    assert any(text.startswith("[4/4] ") for text in said)
    registry.add("data/absent:1", {"opt/name": "late"})
    assert run(dataset, said).counts == {"done": 1, "skipped": 3, "failed": 0, "not started": 0}
    assert len(registry.pulled) == 4


def test_a_registry_that_stumbles_is_asked_again(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "list.txt"
    file.write_text(registry.add("data/one:1", {}) + "\n")
    good, tries = building.run_builder, iter((1, 2))

    def stumble(*arguments: Any, **named: Any) -> None:
        if next(tries, None) == 1:  # the builder's own tries are used up
            raise SandboxError("the pull failed: GET http://127.0.0.1/v2/: 503 Service Unavailable")
        good(*arguments, **named)

    monkeypatch.setattr(building, "run_builder", stumble)
    said: list[str] = []
    report = run(file, said, tries=3)
    assert report.counts["done"] == 1, report.outcomes
    assert report.outcomes[0].tries == 2 and "try 1 of 3 failed" in said[0]


def test_a_full_disk_ends_it(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SandboxError("the pull failed: write: no space left on device")

    monkeypatch.setattr(building, "run_builder", full)
    said: list[str] = []
    report = run(dataset, said)
    assert report.count("failed") <= 2 and report.count("not started") >= 2  # two at a time
    assert any("no room left" in text for text in said)


def test_a_fault_of_ours_is_not_an_images(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(building, "run_builder", broken)
    with pytest.raises(ZeroDivisionError):
        run(dataset, [])


def test_ctrl_c_leaves_a_state_to_go_on_from(registry: Registry, dataset: Path) -> None:
    registry.gate.clear()
    command = [sys.executable, "-m", "prorl_hpc", "image", "convert", str(dataset), "-j", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert registry.asked.wait(60)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    report = json.loads(dataset.with_name("rows.jsonl.report.json").read_text())
    assert report["counts"]["not started"] == 4
    assert "The same command goes on from here" in errors
    assert ImageCache().names() == [] and list(ImageCache().directory.iterdir()) == []
    registry.gate.set()
    done = subprocess.run([*command, "--tries", "1"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1  # one is nowhere
    assert "3 done, 1 failed" in done.stdout and "absent:1" in done.stdout
