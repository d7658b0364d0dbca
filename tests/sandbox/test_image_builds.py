"""Pulls and builds with the real builder: from a registry on this machine, archives, definitions and Dockerfiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import image_registry
import psutil
import pytest
from image_registry import Registry

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.building import BuildOptions, build, builder, pull, run_builder
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.definitions import load_definition, needed_base, rebase
from prorl_hpc.sandbox.images.references import Reference, parse_reference
from prorl_hpc.sandbox.images.resolving import resolve

pytestmark = pytest.mark.apptainer
OPTIONS = BuildOptions(timeout_s=120)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    image_registry.need_builder()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "layers"))
    monkeypatch.setenv("APPTAINER_TMPDIR", str(tmp_path / "tmp"))
    return ImageCache()


@pytest.fixture
def registry(cache: ImageCache) -> Iterator[Registry]:
    with image_registry.serving() as serving:
        yield serving


def quiet(text: str) -> None:
    pass


def reference_of(text: str) -> Reference:
    reference = parse_reference(text)
    assert reference is not None
    return reference


def inside(image: Path, *argv: str) -> str:
    """The output of a command in a container of the image."""
    flags = ["--userns"] if os.getuid() == 0 else []
    command = [builder()[0], "-s", "exec", "--containall", *flags, str(image), *argv]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def image_command(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prorl_hpc", "image", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def only_entries_are_left(cache: ImageCache, names: list[str]) -> None:
    expected = sorted(f"{name}{end}" for name in names for end in (".sif", ".json"))
    assert sorted(path.name for path in cache.directory.iterdir()) == expected
    assert list(Path(os.environ["APPTAINER_TMPDIR"]).iterdir()) == []


def test_a_pull_brings_an_image_that_runs(cache: ImageCache, registry: Registry) -> None:
    reference = registry.add("team/tool:1", {"opt/word": "from the registry\n"})
    said: list[str] = []
    entry, made = pull(cache, reference_of(reference), said.append, OPTIONS)
    assert made and cache.verify(entry.name) == entry
    assert inside(resolve(reference), "cat", "/opt/word") == "from the registry\n"
    assert any("Creating SIF" in line for line in said), said  # progress was shown as it came
    assert entry.labels["org.label-schema.usage.singularity.deffile.bootstrap"] == "docker"
    assert pull(cache, reference_of(reference), quiet, OPTIONS) == (entry, False)
    assert len(registry.pulled) == 1
    only_entries_are_left(cache, [entry.name])


def test_two_pulls_at_once_are_one(cache: ImageCache, registry: Registry) -> None:
    reference = registry.add("team/tool:1", {"opt/word": "once\n"})
    registry.gate.clear()
    pulls = [image_command("pull", reference) for _ in range(2)]
    try:
        assert registry.asked.wait(60)
        waiting = []
        for process in pulls:  # the one that waits says so first, the other speaks of its build
            assert process.stderr is not None
            waiting.append("waiting for process" in process.stderr.readline())
        assert sorted(waiting) == [False, True]
        registry.gate.set()
        outputs = [process.communicate(timeout=60) for process in pulls]
    finally:
        registry.gate.set()
        for process in pulls:
            process.kill()
            process.wait()
    assert [process.returncode for process in pulls] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{resolve(reference)}\n"
    assert len(registry.pulled) == 1
    only_entries_are_left(cache, [reference_of(reference).cache_name])


def test_a_pull_that_was_killed_leaves_nothing_that_looks_whole_and_the_next_one_works(
    cache: ImageCache, registry: Registry
) -> None:
    reference = registry.add("team/tool:1", {"opt/word": "again\n"})
    registry.gate.clear()
    process = image_command("pull", reference)
    try:
        assert registry.asked.wait(60)
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert cache.entries() == [] and cache.names() == []
    with pytest.raises(SandboxError, match="image pull docker://"):
        resolve(reference)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []  # the builder ends with whoever started it
    registry.gate.set()
    said: list[str] = []
    entry, made = pull(cache, reference_of(reference), said.append, OPTIONS)
    assert made and cache.verify(entry.name) == entry
    only_entries_are_left(cache, [entry.name])


def test_a_pull_that_fails_says_why(cache: ImageCache, registry: Registry) -> None:
    registry.add("team/tool:1", {})
    with pytest.raises(SandboxError, match=r"(?s)pull of docker://\S+/absent:1 failed.*no such image or tag"):
        pull(cache, reference_of(f"docker://127.0.0.1:{registry.server_port}/absent:1"), quiet, OPTIONS)
    with pytest.raises(SandboxError, match="node with internet"):
        pull(cache, reference_of("docker://127.0.0.1:9/absent:1"), quiet, OPTIONS)
    only_entries_are_left(cache, [])


def test_a_pull_has_a_time_limit(cache: ImageCache, registry: Registry) -> None:
    reference = registry.add("team/tool:1", {})
    registry.gate.clear()
    before = psutil.Process().children(recursive=True)
    with pytest.raises(SandboxError, match=r"passed its time limit of 2 s \(--timeout\)"):
        pull(cache, reference_of(reference), quiet, BuildOptions(timeout_s=2))
    only_entries_are_left(cache, [])
    new = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in new if child.status() != psutil.STATUS_ZOMBIE]


def test_docker_archives_are_images(cache: ImageCache, tmp_path: Path) -> None:
    archive = tmp_path / "saved.tar"
    image_registry.write_docker_archive(archive, {"opt/word": "from a file\n"})
    entry, _ = pull(cache, reference_of(f"docker-archive:{archive}"), quiet, OPTIONS)
    assert entry.name.startswith("saved.tar-")
    assert inside(resolve(f"docker-archive:{archive}"), "cat", "/opt/word") == "from a file\n"


def test_the_tiny_image_is_built_from_the_node_alone(cache: ImageCache) -> None:
    definition = load_definition("tiny")
    entry, made = build(cache, "tiny", definition, quiet, OPTIONS)
    assert made and entry.kind == "definition"
    assert inside(resolve("tiny"), "sh", "-c", "cd /workspace && echo well") == "well\n"
    assert build(cache, "tiny", definition, quiet, OPTIONS) == (entry, False)
    other = load_definition("base")
    with pytest.raises(SandboxError, match="--force builds it again, --name NAME makes another"):
        build(cache, "tiny", other, quiet, OPTIONS)
    only_entries_are_left(cache, ["tiny"])


def test_a_definition_can_be_built_on_an_image_of_the_cache(cache: ImageCache, tmp_path: Path) -> None:
    build(cache, "tiny", load_definition("tiny"), quiet, OPTIONS)
    (tmp_path / "data.txt").write_text("data\n")
    file = tmp_path / "Mine.def"
    file.write_text(
        "Bootstrap: localimage\nFrom: tiny.sif\n\n%files\n    data.txt /opt/data.txt\n\n%post\n    echo post >>/opt/data.txt\n"
    )
    definition = load_definition(str(file))
    assert (definition.name, needed_base(definition)) == ("mine", "tiny")
    text = rebase(definition.text, "tiny", cache)
    build(cache, "mine", type(definition)(text, "definition", str(file), tmp_path, "mine"), quiet, OPTIONS)
    assert inside(resolve("mine"), "cat", "/opt/data.txt") == "data\npost\n"


def test_a_definition_that_fails_shows_its_last_lines(cache: ImageCache, tmp_path: Path) -> None:
    file = tmp_path / "bad.def"
    file.write_text("Bootstrap: scratch\n\n%setup\n    printf 'caf\\351 is what it said\\n'\n    exit 3\n")
    with pytest.raises(SandboxError, match=r"(?s)build of \S+bad.def failed.*caf. is what it said.*FATAL"):
        build(cache, "bad", load_definition(str(file)), quiet, OPTIONS)
    only_entries_are_left(cache, [])


def test_a_build_that_says_much_does_not_stop(cache: ImageCache, tmp_path: Path) -> None:
    """spython reads standard error only at the end: past 64 KiB a build would wait for ever."""
    file = tmp_path / "loud.def"
    file.write_text("Bootstrap: scratch\n\n%setup\n    set +x\n    seq 100000 >&2\n    exit 1\n")
    said: list[str] = []
    with pytest.raises(SandboxError, match="failed"):
        build(cache, "loud", load_definition(str(file)), said.append, OPTIONS)
    assert said.count("100000") == 1 and len(said) > 100000


def test_a_dockerfile_means_what_it_means_to_docker(cache: ImageCache, tmp_path: Path) -> None:
    archive = tmp_path / "busybox.tar"
    image_registry.write_docker_archive(archive, {})
    project = tmp_path / "Project"
    (project / "sub").mkdir(parents=True)
    (project / "sub" / "inner.txt").write_text("inner\n")
    (project / "data.txt").write_text("data\n")
    (project / "Dockerfile").write_text(
        "ARG BASE=busybox\n"
        "FROM $BASE\n"
        'ENV GREETING="hello world" TWICE=$BASE\n'
        "ENV OLD the old form\n"
        "WORKDIR /opt/app\n"
        "COPY data.txt renamed.txt\n"
        "COPY sub .\n"
        "RUN cd /tmp && echo $GREETING >/opt/app/greeting && \\\n"
        "    # a comment within\n"
        "    pwd >/opt/app/first\n"
        "RUN pwd >second; false; true\n"
        'RUN ["sh", "-c", "echo \'$HOME is not replaced\' >array"]\n'
        "COPY data.txt greeting\n"
        "USER nobody\n"
        "RUN cat greeting >third\n"
        "EXPOSE 80\n"
        'ENTRYPOINT ["cat", "/opt/app/greeting"]\n'
    )
    definition = load_definition(str(project))
    assert (definition.name, definition.kind) == ("project", "dockerfile")
    assert [note.split(" (")[0] for note in definition.notes] == ["USER", "EXPOSE"]
    text = rebase(definition.text, f"docker-archive:{archive}", cache)
    build(cache, "project", type(definition)(text, "dockerfile", "x", project, "project"), quiet, OPTIONS)
    image = resolve("project")
    words = {
        name: inside(image, "cat", f"/opt/app/{name}") for name in ("renamed.txt", "inner.txt", "greeting", "first")
    }
    assert words == {"renamed.txt": "data\n", "inner.txt": "inner\n", "greeting": "data\n", "first": "/tmp\n"}
    assert inside(image, "cat", "/opt/app/second", "/opt/app/third") == "/opt/app\ndata\n"
    assert inside(image, "cat", "/opt/app/array") == "$HOME is not replaced\n"
    assert inside(image, "sh", "-c", 'echo "$GREETING, $OLD"') == "hello world, the old form\n"
    assert ".prorl-copy" not in inside(image, "ls", "-a", "/")


def test_a_whole_context_arrives_as_it_is(cache: ImageCache, tmp_path: Path) -> None:
    archive = tmp_path / "busybox.tar"
    image_registry.write_docker_archive(archive, {})
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "sub" / "with blank.txt").write_text("inner\n")
    (project / "link").symlink_to("sub/with blank.txt")
    (project / "nowhere").symlink_to("absent")
    (project / "secret").write_text("secret\n")
    (project / ".dockerignore").write_text("secret\n")
    (project / "Dockerfile").write_text("FROM busybox\nWORKDIR /app\nCOPY . .\nRUN cat link >read\n")
    definition = load_definition(str(project))
    text = rebase(definition.text, f"docker-archive:{archive}", cache)
    build(cache, "whole", type(definition)(text, "dockerfile", "x", project, "whole"), quiet, OPTIONS)
    image = resolve("whole")
    there = inside(image, "ls", "-A", "/app").split()
    assert there == [".dockerignore", "Dockerfile", "link", "nowhere", "read", "sub"]
    assert inside(image, "cat", "/app/read") == "inner\n"
    listed = inside(image, "ls", "-l", "/app")
    assert "link -> sub/with blank.txt" in listed and "nowhere -> absent" in listed


def test_stop_ends_a_builder(cache: ImageCache, registry: Registry) -> None:
    import threading

    reference = registry.add("team/tool:1", {})
    registry.gate.clear()
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    started = time.monotonic()
    with pytest.raises(SandboxError, match="was stopped"):
        pull(cache, reference_of(reference), quiet, OPTIONS, stop)
    assert time.monotonic() - started < 60
    only_entries_are_left(cache, [])


def test_inspect_of_what_is_no_image_fails(cache: ImageCache, tmp_path: Path) -> None:
    (tmp_path / "no.sif").write_text("no image")
    request = {"what": "inspect", "binary": builder()[0], "source": str(tmp_path / "no.sif")}
    with pytest.raises(SandboxError, match="inspect of"):
        run_builder(request, quiet, 60)
