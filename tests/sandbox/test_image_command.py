"""``prorl-hpc image``, as a person types it."""

from __future__ import annotations

from pathlib import Path

import image_registry
import pytest
from test_image_cache import put, sif_bytes

from prorl_hpc.__main__ import main
from prorl_hpc.sandbox.images.cache import ImageCache


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["biuld", "x"], "did you mean build?"),
        (["remove", "oen"], "did you mean one?"),
        (["verify", "zzz"], "image list"),
        (["build", "codng"], "did you mean coding?"),
        (["pull", "NOT GOOD"], "docker://[HOST/]NAME[:TAG]"),
        (["pull", "docker-archive:/no/such.tar"], "there is no file /no/such.tar"),
        (["pull", "docker://a", "--timeout", "0"], "--timeout takes a number above 0"),
        (["convert", "/no/such.txt"], "/no/such.txt is not a file"),
        (["convert", "/no/such.txt", "-j", "0"], "--jobs takes a number above 0"),
    ],
)
def test_mistakes_are_answered(
    cache: ImageCache, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    put(cache, "one")
    assert main(["image", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ([], ["build"], ["pull"], ["list"], ["verify"], ["convert"], ["remove"]):
        with pytest.raises(SystemExit) as caught:
            main(["image", *verb, "--help"])
        assert caught.value.code == 0
    assert "usage: prorl-hpc image" in capsys.readouterr().out


def test_a_dockerfile_can_be_looked_at(cache: ImageCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN true\n")
    assert main(["image", "build", "--show", str(tmp_path)]) == 0
    assert "From: debian:12" in capsys.readouterr().out


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
