"""A Dockerfile as a definition file, by spython's DockerParser and SingularityWriter.

spython (0.3.14) converts line by line into one script, which changes what many Dockerfiles mean: ENV does not reach the
commands of RUN, the array form of RUN becomes a syntax error, ``cd`` and ``set`` leak from one RUN into the next, USER
becomes ``su`` without a command, all COPYs happen before all RUNs, a copied directory lands one level too deep, and unnamed
stages merge. So it is given an equal Dockerfile without these: each RUN is a command line of its own in its WORKDIR, files
are copied aside first and into place when their turn comes. What cannot be said in a SIF is refused by line, or noted.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.build_context import BuildContext
from prorl_hpc.sandbox.images.dockerfile_lines import heredocs, instructions

_ASIDE = "/.prorl-copy"
_COPY = (
    'prorl_copy() { if [ -d "$1" ]; then mkdir -p "$2" && cp -a "$1/." "$2/"; elif [ -d "$2" ] || [ "${2%/}" != "$2" ]; '
    'then mkdir -p "$2" && cp -a "$1" "$2/"; else mkdir -p "$(dirname "$2")" && cp -a "$1" "$2"; fi; }'
)
"""Docker's rules: of a directory its content; into a destination that is a directory or ends with a slash, else as it."""
_MEANINGLESS = {
    "EXPOSE": "a sandbox has no ports",
    "HEALTHCHECK": "nothing asks for a sandbox's health",
    "MAINTAINER": "a label",
    "STOPSIGNAL": "a sandbox ends with its tool server",
    "USER": "it runs as the user who starts it",
    "ONBUILD": "nothing is built on it that knows of it",
}
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2|txz|tar\.(gz|bz2|xz))$")


@dataclass(frozen=True)
class Converted:
    text: str
    notes: tuple[str, ...]


@dataclass
class _Stage:
    name: str
    lines: list[str]
    """For spython."""
    workdir: str = "/"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    environment: list[str] = field(default_factory=list)
    labels: list[list[str]] = field(default_factory=list)
    files: list[list[str]] = field(default_factory=list)
    """From the context: (source, place)."""
    copies: int = 0


def convert_dockerfile(path: Path) -> Converted:
    """Raises SandboxError that names each line that cannot be converted, and what to write instead."""
    conversion, wrong = _Conversion(path), []
    for number, instruction, rest in instructions(path):
        try:
            conversion.add(number, instruction, rest)
        except _RefusedError as refused:
            wrong.append(f"{path}, line {number}: {refused}")
    if wrong:
        raise SandboxError("\n".join(wrong))
    if not conversion.stages:
        raise SandboxError(f"{path} has no FROM")
    return Converted(_write(conversion), tuple(dict.fromkeys(conversion.notes)))


class _RefusedError(Exception):
    """Why an instruction cannot be converted."""


class _Conversion:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.context = BuildContext(path)
        self.stages: list[_Stage] = []
        self.first_args: list[str] = []
        """ARGs before the first FROM: they may only be used in FROM."""
        self.notes: list[str] = []

    def add(self, number: int, instruction: str, rest: str) -> None:
        if instruction in _MEANINGLESS:
            self.notes.append(f"{instruction} (line {number}) is left out: {_MEANINGLESS[instruction]}")
            return
        method = _METHODS.get(instruction)
        if method is None:
            self._refuse(f"{instruction} is not an instruction that is known here")
        if instruction not in ("FROM", "ARG") and not self.stages:
            self.stages.append(_Stage("", []))  # so that the other lines are looked at, too
            self._refuse(f"{instruction} stands before FROM")
        if heredocs(instruction, rest):
            self._refuse(f"{instruction} with a heredoc is not supported: put the text into a file and COPY it")
        method(self, number, rest)

    def _refuse(self, why: str) -> NoReturn:
        raise _RefusedError(why)

    def _from(self, number: int, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        name = words[2].lower() if len(words) == 3 else f"stage-{len(self.stages)}"
        earlier = [stage.name for stage in self.stages]
        self.stages.append(_Stage(name, [*self.first_args, f"FROM {' '.join(words[:1])} AS {name}", f"RUN {_COPY}"]))
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            self._refuse("FROM takes IMAGE or IMAGE AS NAME")
        if words[0] == "scratch" or words[0].lower() in earlier:
            self._refuse(f"FROM {words[0]}: a definition can only start from an image of a registry")

    def _arg(self, number: int, rest: str) -> None:
        if "=" not in rest:
            self.notes.append(f"ARG {rest.strip()} (line {number}) has no default and stays empty")
            return
        if not self.stages:
            self.first_args.append(f"ARG {rest.strip()}")
            return
        self.stages[-1].lines += [f"RUN export {name}={_quoted(value)}" for name, value in self._pairs(rest)]

    def _env(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        for name, value in self._pairs(rest):
            stage.environment.append(f"{name}={_quoted(value)}")
            stage.lines.append(f"RUN export {name}={_quoted(value)}")

    def _label(self, number: int, rest: str) -> None:
        self.stages[-1].labels += [[name, value.replace("\n", " ")] for name, value in self._pairs(rest)]

    def _pairs(self, rest: str) -> list[tuple[str, str]]:
        if not re.match(r"[^\s=]+=", rest):  # the old form: one name, and all the rest is its value
            name, _, value = rest.strip().partition(" ")
            return [(name, value.strip())]
        try:
            words = shlex.split(rest)
        except ValueError as error:
            self._refuse(f"its quotes do not match: {error}")
        if wrong := [word for word in words if "=" not in word]:
            self._refuse(f"{wrong[0]!r} is not NAME=VALUE")
        return [(word.partition("=")[0], word.partition("=")[2]) for word in words]

    def _workdir(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        stage.workdir = posixpath.join(stage.workdir, rest.strip().strip("\"'"))
        stage.lines.append(f"WORKDIR {stage.workdir}")

    def _shell(self, number: int, rest: str) -> None:
        self.stages[-1].shell = tuple(self._array(rest)) or self._refuse("SHELL takes a JSON array")

    def _run(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        while match := re.match(r"--(\w+)=(\S+)\s+", rest):
            if match[1] == "mount" and not re.search(r"type=(cache|tmpfs)", match[2]):
                self._refuse(f"RUN --mount={match[2]} is not supported: COPY what it needs")
            rest = rest[match.end() :]
        argv = self._array(rest)
        command = shlex.join(argv) if argv else shlex.join([*stage.shell, rest.strip()])
        stage.lines.append(f"RUN cd {shlex.quote(stage.workdir)} && {command}")

    def _copy(self, number: int, rest: str) -> None:
        self._bring(number, rest, unpack=False)

    def _add(self, number: int, rest: str) -> None:
        self._bring(number, rest, unpack=True)

    def _bring(self, number: int, rest: str, unpack: bool) -> None:
        stage, flags = self.stages[-1], {}
        while match := re.match(r"--(\w+)(?:=(\S+))?\s+", rest):
            flags[match[1]] = match[2] or ""
            rest = rest[match.end() :]
        words = self._array(rest) or rest.split()
        if len(words) < 2:
            self._refuse("COPY and ADD take SOURCE… DESTINATION")
        if "from" in flags and any(re.search(r"\s", word) for word in words):
            self._refuse("COPY --from takes no white space in what it copies")
        *sources, destination = words
        paths: list[Path] = []
        if "from" in flags:
            sources = [posixpath.join("/", source) for source in sources]
            option = f"--from={self._stage_name(flags['from'])} "
        else:
            paths = self._local(sources)
            sources, option = [str(path) for path in paths], ""
        slash = "/" if destination.endswith(("/", "/.")) or destination == "." or len(sources) > 1 else ""
        target = posixpath.normpath(posixpath.join(stage.workdir, destination)).rstrip("/") + slash
        for number_of_source, source in enumerate(sources):
            stage.copies += 1
            aside = f"{_ASIDE}/{stage.copies}"
            name = posixpath.basename(source.rstrip("/"))
            if paths:
                self._aside(stage, paths[number_of_source], f"{aside}/{name}")
            else:
                stage.lines.append(f"COPY {option}{source} {aside}/{name}")
            place = shlex.quote(target or "/")
            if unpack and _ARCHIVE.search(name):
                stage.lines.append(f"RUN mkdir -p {place} && tar -xf {shlex.quote(f'{aside}/{name}')} -C {place}")
                continue
            mode = (
                f"chmod -R {shlex.quote(flags['chmod'])} {shlex.quote(f'{aside}/{name}')} && "
                if "chmod" in flags
                else ""
            )
            stage.lines.append(f"RUN {mode}prorl_copy {shlex.quote(f'{aside}/{name}')} {place}")
        if "chown" in flags:
            self.notes.append(f"--chown (line {number}) is left out: in a sandbox all files are its user's to read")

    def _aside(self, stage: _Stage, source: Path, place: str) -> None:
        """Copied by Apptainer before all RUNs, as far as it copies them as they are; links are made by a RUN."""
        try:
            pieces = self.context.pieces(source)
        except OSError as error:
            self._refuse(f"{error.filename} cannot be read: {error.strerror}")
        for piece in pieces:
            target = posixpath.join(place, piece.place).rstrip("/")
            if re.search(r'["\n]', f"{piece.path}"):
                self._refuse(f"{str(piece.path)!r} cannot be copied: a quote or line end in its name")
            if piece.kind == "whole":
                stage.files.append(
                    [f'"{path}"' if re.search(r"[\s']", path) else path for path in (str(piece.path), target)]
                )
            elif piece.kind == "directory":
                stage.lines.append(f"RUN mkdir -p {shlex.quote(target)}")
            else:
                link = f"ln -sfn {shlex.quote(os.readlink(piece.path))} {shlex.quote(target)}"  # noqa: PTH115
                stage.lines.append(f"RUN {link}")

    def _stage_name(self, given: str) -> str:
        names = [stage.name for stage in self.stages[:-1]]
        if given.isdigit() and int(given) < len(names):
            return names[int(given)]
        if given.lower() not in names:
            self._refuse(f"--from={given} is none of the stages before ({', '.join(names) or 'there is none'})")
        return given.lower()

    def _local(self, sources: list[str]) -> list[Path]:
        found: list[Path] = []
        for source in sources:
            if re.match(r"(https?|git)://|git@", source):
                self._refuse(f"ADD {source}: write RUN curl -fsSL {source} -o FILE")
            try:
                paths = self.context.find(source)
            except ValueError as error:
                self._refuse(f"{source}: {error}")
            if not paths:
                self._refuse(f"there is no {source} in {self.context.directory}, or .dockerignore leaves it out")
            found += paths
        return found

    def _cmd(self, number: int, rest: str) -> None:
        self.stages[-1].lines.append(f"CMD {rest.strip()}")

    def _entrypoint(self, number: int, rest: str) -> None:
        self.stages[-1].lines.append(f"ENTRYPOINT {rest.strip()}")

    def _volume(self, number: int, rest: str) -> None:
        places = self._array(rest) or rest.split()
        self.stages[-1].lines.append(f"RUN mkdir -p {shlex.join(places)}")

    @staticmethod
    def _array(rest: str) -> list[str]:
        """The words of a JSON array; nothing when it is not one."""
        try:
            words = json.loads(rest) if rest.lstrip().startswith("[") else []
        except ValueError:
            return []
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _quoted(value: str) -> str:
    """In double quotes: variables are replaced, as Docker does."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", value) + '"'


_METHODS = {
    name.upper(): getattr(_Conversion, f"_{name}")
    for name in ["from", "arg", "env", "label", "workdir", "shell", "run", "copy", "add", "cmd", "entrypoint", "volume"]
}


def _write(conversion: _Conversion) -> str:
    from spython.main.parse.parsers import DockerParser
    from spython.main.parse.writers import SingularityWriter

    lines = [line for stage in conversion.stages for line in [*stage.lines, f"RUN rm -rf {_ASIDE}"]]
    with tempfile.NamedTemporaryFile("w", prefix="Dockerfile-", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    try:
        parser = DockerParser(file.name)
    finally:
        os.unlink(file.name)  # noqa: PTH108
    for stage, recipe in zip(conversion.stages, parser.recipe.values(), strict=True):
        recipe.environ, recipe.labels, recipe.files = stage.environment, stage.labels, stage.files
    text: str = SingularityWriter(parser.recipe).convert(runscript="/bin/sh")
    return f"# Converted from {conversion.path.name}\n{text}\n"
