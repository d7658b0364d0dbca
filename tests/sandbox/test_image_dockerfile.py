"""What a Dockerfile becomes, and what is refused; test_image_builds.py builds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.definitions import load_definition, needed_base, rebase, shipped_directory
from prorl_hpc.sandbox.images.dockerfile import Converted, convert_dockerfile
from prorl_hpc.sandbox.images.resolving import SHIPPED


def converted(tmp_path: Path, text: str) -> Converted:
    file = tmp_path / "Dockerfile"
    file.write_text(text)
    return convert_dockerfile(file)


def test_stages_stay_apart(tmp_path: Path) -> None:
    result = converted(
        tmp_path,
        "FROM golang:1.22 AS Build\nRUN go build -o /out/tool .\nFROM --platform=linux/amd64 debian:12-slim\n"
        "COPY --from=build /out/tool /usr/bin/\nCOPY --from=0 /etc/passwd /opt/passwd\n",
    )
    first, second = result.text.split("Bootstrap: docker")[1:]
    assert "From: golang:1.22" in first and "Stage: build" in first and "go build" in first
    assert "From: debian:12-slim" in second and "go build" not in second
    assert "%files from build\n/out/tool /.prorl-copy/1/tool\n/etc/passwd /.prorl-copy/2/passwd" in second
    assert "prorl_copy /.prorl-copy/1/tool /usr/bin/" in second


def test_the_shell_and_its_directory_are_each_runs_own(tmp_path: Path) -> None:
    text = converted(
        tmp_path, 'FROM a\nWORKDIR /one\nWORKDIR two\nSHELL ["/bin/bash", "-c"]\nRUN cd / && set -x\nRUN echo "it\'s"\n'
    ).text
    assert "cd /one/two && /bin/bash -c 'cd / && set -x'" in text
    assert "cd /one/two && /bin/bash -c 'echo \"it'\"'\"'s\"'" in text


def test_labels_and_environment_reach_the_image(tmp_path: Path) -> None:
    text = converted(tmp_path, 'FROM a\nLABEL who="some body" what=thing\nENV A=1 B="two words"\nARG C=3\n').text
    assert "%labels\nwho some body\nwhat thing" in text
    assert '%environment\nexport A="1"\nexport B="two words"\n' in text
    assert 'export C="3"' in text.split("%environment")[0]


def test_what_means_nothing_is_noted(tmp_path: Path) -> None:
    notes = converted(tmp_path, "FROM a\nUSER me\nHEALTHCHECK CMD true\nCOPY --chown=me:me Dockerfile /x\n").notes
    assert [note.split()[0] for note in notes] == ["USER", "HEALTHCHECK", "--chown"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RUN true\n", "line 1: RUN stands before FROM"),
        ("", "has no FROM"),
        ("FROM a\nCOPY absent.txt /x\n", "line 2: there is no absent.txt"),
        ("FROM a\nCOPY ../../etc/passwd /x\n", "line 2:"),
        ("FROM a\nCOPY --from=other /x /y\n", "line 2: --from=other is none of the stages before"),
        ("FROM a\nRUN <<EOF\ntrue\nEOF\n", "line 2: RUN with a heredoc is not supported"),
        ("FROM a\nRUN --mount=type=secret,id=x cat /x\n", "line 2: RUN --mount=type=secret,id=x is not supported"),
        ("FROM a\nADD http://127.0.0.1/x.tar /x\n", "write RUN curl"),
        ("FROM a\nFROBNICATE x\n", "line 2: FROBNICATE is not an instruction"),
        ("FROM scratch\nCOPY Dockerfile /\n", "line 1: FROM scratch"),
        ("FROM a AS b\nFROM b\n", "line 2: FROM b"),
        ('FROM a\nENV A="open\n', "line 2: its quotes do not match"),
        ("FROM a\nRUN true \\\n", "ends within the instruction of line 2"),
        ("FROM a\nSHELL bash\n", "SHELL takes a JSON array"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SandboxError) as caught:
        converted(tmp_path, text)
    assert words in str(caught.value)


def test_all_that_cannot_be_converted_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as caught:
        converted(tmp_path, "FROM a\nRUN <<EOF\nFROM within\nEOF\nCOPY absent /x\nRUN true <<<word\nFROBNICATE\n")
    words = str(caught.value).splitlines()
    assert [word.split(", ")[1].split(":")[0] for word in words] == ["line 2", "line 5", "line 7"]


@pytest.mark.parametrize(
    "line", ["COPY . .", "COPY ./ /app/", "ADD . /app", "COPY / /app", 'COPY [".","/app"]', "COPY ./. /app"]
)
def test_the_whole_context_is_copied(tmp_path: Path, line: str) -> None:
    text = converted(tmp_path, f"FROM a\nWORKDIR /app\n{line}\n").text
    aside = f"/.prorl-copy/1/{tmp_path.name}"
    assert f"%files\n{tmp_path} {aside}\n" in text
    assert f"prorl_copy {aside} /app" in text


def test_dockerignore_and_links_are_dockers(tmp_path: Path) -> None:
    for name in ("kept/a", "kept/b.log", "kept/keep.log", "data/big", "data/deep/small", "a b/c", "x.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "nowhere").symlink_to("absent")
    (tmp_path / ".dockerignore").write_text("# none of these\n**/*.log\n!kept/keep.log\n/data\n!data/deep\n")
    text = converted(tmp_path, "FROM a\nCOPY . /app\n").text
    aside = f"/.prorl-copy/1/{tmp_path.name}"
    files = text.split("%files\n")[1].split("\n%")[0].splitlines()
    expected = [".dockerignore", "Dockerfile", "a b", "data/deep", "kept/a", "kept/keep.log"]
    assert [line for line in files if line] == [
        f'"{tmp_path}/{name}" "{aside}/{name}"' if " " in name else f"{tmp_path}/{name} {aside}/{name}"
        for name in expected
    ]
    assert f"ln -sfn absent {aside}/nowhere" in text
    quoted = converted(tmp_path, 'FROM a\nCOPY ["a b/c", "/app/d e"]\n').text
    assert f'"{tmp_path}/a b/c" /.prorl-copy/1/c' in quoted and "prorl_copy /.prorl-copy/1/c '/app/d e'" in quoted
    with pytest.raises(SandboxError, match=r"line 2: there is no x\.log .* or \.dockerignore leaves it out"):
        converted(tmp_path, "FROM a\nCOPY x.log /app\n")


def test_shipped_definitions_are_there_and_can_be_put_on_other_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    cache = ImageCache()
    assert {path.stem for path in shipped_directory().glob("*.def")} == set(SHIPPED)
    for name in SHIPPED:  # what writes into a pipe that is closed complains, and looks like a failure
        assert "| head" not in load_definition(name).text
    base = load_definition("base")
    assert "Bootstrap: docker\nFrom: debian" in base.text
    text = rebase(base.text, "debootstrap:http://127.0.0.1/debian", cache)
    assert text.startswith("Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: http://127.0.0.1/debian\n")
    assert "From:" not in text and text.count("%post") == 1
    assert "Bootstrap: docker-archive\nFrom: /x/y.tar\n" in rebase(base.text, "docker-archive:/x/y.tar", cache)
    assert needed_base(load_definition("coding")) == "base"
    with pytest.raises(ConfigError, match="no reference, no file, and no name"):
        rebase(base.text, "nowhere", cache)
    with pytest.raises(ConfigError, match="`prorl-hpc image build base` makes it"):
        rebase(base.text, "base", cache)
    with pytest.raises(ConfigError, match=r"did you mean coding\? build takes agents, base"):
        load_definition("codin")
