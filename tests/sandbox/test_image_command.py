"""``prorl-hpc image``, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import image_registry
import pytest
from test_image_cache import put, sif_bytes

from prorl_hpc.__main__ import main
from prorl_hpc.cli.image_conversion import summary
from prorl_hpc.cli.image_words import size_text
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images import building
from prorl_hpc.sandbox.images.archives import check_archive
from prorl_hpc.sandbox.images.builder_error import BuilderError
from prorl_hpc.sandbox.images.cache import ImageCache, Progress
from prorl_hpc.sandbox.images.conversion import DONE, FAILED, Outcome, Report
from prorl_hpc.sandbox.images.references import read_reference
from prorl_hpc.sandbox.images.resolving import check
from prorl_hpc.sandbox.images.sif import this_architecture


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    return ImageCache()


def test_an_empty_cache_says_how_to_fill_it(cache: ImageCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "list"]) == 0
    assert "prorl-hpc image build base" in capsys.readouterr().out


def test_images_are_listed_verified_and_removed(cache: ImageCache, capsys: pytest.CaptureFixture[str]) -> None:
    put(cache, "one")
    put(cache, "two")
    assert main(["image", "list"]) == 0
    listed = capsys.readouterr().out
    assert "one " in listed and "docker://docker.io/library/two:latest" in listed and "2 images" in listed
    assert main(["image", "verify"]) == 0
    assert "2 sound, 0 not" in capsys.readouterr().out
    cache.path("two").write_bytes(sif_bytes()[:-1])
    assert main(["image", "verify", "one", "two"]) == 1
    told = capsys.readouterr().out
    assert "1 sound, 1 not" in told and "prorl-hpc image pull --force docker://docker.io/library/two:latest" in told
    assert main(["image", "remove", "two"]) == 0
    assert cache.names() == ["one"]


def test_an_image_put_there_by_hand_is_explained_and_counted(
    cache: ImageCache, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, "one")
    cache.path("byhand").write_bytes(sif_bytes(filling=b"x" * (3 << 20)))
    (cache.directory / "no name.sif").write_bytes(b"")
    assert main(["image", "list"]) == 0
    listed = capsys.readouterr().out
    assert "2 images (1 of them not whole), 3.1 MiB in" in listed
    with pytest.raises(SandboxError, match=r"no readable byhand.json.*put there by hand.*name it by its path"):
        check("byhand")
    cache.path("one").write_bytes(b"short")
    with pytest.raises(SandboxError, match="has 5 bytes instead of"):
        check("one")


def test_an_empty_image_is_called_empty() -> None:
    for image in ("", " "):
        with pytest.raises(SandboxError, match=r"the image is empty: sandbox\.image takes a \.sif file"):
            check(image)


def test_what_of_several_pulls_failed_is_told_and_the_others_are_made(
    cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "builder", lambda: ("apptainer", "apptainer 1"))
    monkeypatch.setattr(building, "inspect_labels", lambda *_: {})

    def run(request: dict[str, Any], progress: Progress, *_: object, **named: object) -> None:
        progress("streamed")
        if "bad" in request["source"]:
            raise BuilderError("the pull of bad failed (exit code 1)", "streamed\n404", hinted=True)
        Path(request["target"]).write_bytes(sif_bytes())

    monkeypatch.setattr(building, "run_builder", run)
    absent = f"docker-archive:{tmp_path}/absent.tar"
    assert main(["image", "pull", "docker://a", "docker://bad", absent, "docker://c"]) == 1
    told = capsys.readouterr()
    assert [Path(line).name.split("-")[0] for line in told.out.splitlines()] == ["a", "c"]
    assert f"there is no file {tmp_path}/absent.tar" in told.err
    assert f"2 of 4 images could not be pulled: docker://docker.io/library/bad:latest, {absent}" in told.err
    assert main(["image", "pull", "docker://bad"]) == 1
    told = capsys.readouterr()
    assert told.err.count("streamed") == 1  # as it came, and not once more in the error
    assert "→ the registry has no such image or tag" in told.err


def test_wrong_references_are_all_told_before_anything_is_pulled(
    cache: ImageCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.tar").write_bytes(b"")
    wrong = ["NOT GOOD", "http://foo", "https://foo/", f"{tmp_path}/mine.tar", "ftp://x/y"]
    assert main(["image", "pull", *wrong, "docker://a"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 5 and all(text in line for text, line in zip(wrong, told, strict=True))
    assert f"docker-archive:{tmp_path}/mine.tar if `docker save` wrote it" in told[3]
    (tmp_path / "list.txt").write_text("\n".join([*wrong, "docker://a"]))
    assert main(["image", "convert", str(tmp_path / "list.txt")]) == 2
    assert [f"line {number}" in line for number, line in enumerate(capsys.readouterr().err.splitlines(), 1)] == [
        True
    ] * 5
    (tmp_path / "list.jsonl").write_text('{"image": "a"}\n{\n{"image": 3}\n[]\n{"image": "NO GOOD"}\n')
    assert main(["image", "convert", str(tmp_path / "list.jsonl")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_an_archive_is_looked_at_before_it_is_pulled(tmp_path: Path) -> None:
    here = this_architecture()
    other = "arm64" if here == "amd64" else "amd64"
    archive = tmp_path / "saved.tar"
    reference = read_reference(f"docker-archive:{archive}")
    image_registry.write_docker_archive(archive, {"opt/word": "x" * 20000})
    check_archive(reference)
    whole = archive.read_bytes()
    for content in (whole[:9000], whole[:300], b"", b"junk\n"):
        archive.write_bytes(content)
        with pytest.raises(SandboxError, match=r"cannot be read as an archive .* copy it again"):
            check_archive(reference)
    archive.write_bytes(whole.replace(f'"{here}"'.encode(), f'"{other}"'.ljust(len(here) + 2).encode()))
    with pytest.raises(SandboxError, match=f"is for {other}, and this machine is {here}: save the image for {here}"):
        check_archive(reference)
    archive.write_bytes(whole)
    with pytest.raises(SandboxError, match="holds no image as oci-archive has it"):
        check_archive(read_reference(f"oci-archive:{archive}"))
    write_oci_layout(tmp_path / "oci", other)
    with pytest.raises(SandboxError, match=f"is for {other}"):
        check_archive(read_reference(f"oci:{tmp_path}/oci:tag"))
    write_oci_layout(tmp_path / "oci", here)
    check_archive(read_reference(f"oci:{tmp_path}/oci"))


def test_a_failed_conversion_is_told_once_and_small_sizes_in_their_unit(tmp_path: Path) -> None:
    why = BuilderError("the pull of x failed (exit code 1)", "FATAL: unexpected EOF", hinted=True)
    assert "→ what it read ended too soon" in str(why)
    report = Report(
        [Outcome("docker://x", "x", FAILED, str(why), tries=3), Outcome("docker://y", "y", DONE, size=1200)]
    )
    assert summary(report, tmp_path / "r.json").splitlines() == [
        "1 done, 1 failed",
        "failed: docker://x (tries: 3)",
        f"1.2 KiB in the cache; report, and why each one failed: {tmp_path}/r.json",
    ]
    assert [size_text(size) for size in (0, 3 << 20, 5 << 30)] == ["0 bytes", "3.0 MiB", "5.0 GiB"]


def write_oci_layout(directory: Path, architecture: str) -> None:
    (directory / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (directory / "blobs/sha256/c").write_text(json.dumps({"architecture": architecture}))
    (directory / "blobs/sha256/m").write_text(json.dumps({"config": {"digest": "sha256:c"}}))
    (directory / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:m"}]}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["biuld", "x"], "did you mean build?"),
        (["remove", "oen"], "did you mean one?"),
        (["verify", "zzz"], "image list"),
        (["build", "codng"], "did you mean coding?"),
        (["pull", "NOT GOOD"], "docker://[HOST/]NAME[:TAG]"),
        (["pull", "docker-archive:/no/such.tar"], "there is no file /no/such.tar"),
        (["build", "tiny", "--name", "host"], "--name: 'host' cannot name an image"),
        (["build", "coding", "--from", "base"], "`prorl-hpc image build base` makes it"),
        (["pull", "docker://a", "--timeout", "0"], "--timeout takes a number above 0"),
        (["convert", "/no/such.txt"], "/no/such.txt is not a file"),
        (["convert", "/no/such.txt", "-j", "0"], "--jobs takes a number above 0"),
    ],
)
def test_mistakes_are_answered(
    cache: ImageCache, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    put(cache, "one")
    assert main(["image", *arguments]) == (1 if "docker-archive:/no/such.tar" in arguments else 2)
    assert words in capsys.readouterr().err


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ([], ["build"], ["pull"], ["list"], ["verify"], ["convert"], ["remove"]):
        with pytest.raises(SystemExit) as caught:
            main(["image", *verb, "--help"])
        assert caught.value.code == 0
    assert "usage: prorl-hpc image" in capsys.readouterr().out


def test_a_dockerfile_can_be_looked_at(cache: ImageCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN true\nUSER me\n")
    assert main(["image", "build", "--show", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "From: debian:12" in told.out and "USER (line 3) is left out" in told.err


@pytest.mark.apptainer
def test_an_image_is_built_pulled_and_used(
    cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image_registry.need_builder()
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "layers"))
    assert main(["image", "build", "tiny"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{cache.path('tiny')}\n" and "sandbox.image=tiny" in told.err
    with image_registry.serving() as registry:
        reference = registry.add("team/tool:1", {})
        assert main(["image", "pull", reference]) == 0
        assert f"sandbox.image={reference}" in capsys.readouterr().err
        assert main(["image", "remove", reference]) == 0
    assert cache.names() == ["tiny"]
