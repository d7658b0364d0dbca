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
    copies: int = 0


def convert_dockerfile(path: Path) -> Converted:
    """Raises SandboxError that names the line and what to write instead."""
    conversion = _Conversion(path)
    for number, instruction, rest in _instructions(path):
        conversion.add(number, instruction, rest)
    if not conversion.stages:
        raise SandboxError(f"{path} has no FROM")
    return Converted(_write(conversion), tuple(dict.fromkeys(conversion.notes)))


class _Conversion:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path.parent
        self.stages: list[_Stage] = []
        self.first_args: list[str] = []
        """ARGs before the first FROM: they may only be used in FROM."""
        self.notes: list[str] = []

    def add(self, number: int, instruction: str, rest: str) -> None:
        if instruction in _MEANINGLESS:
            self.notes.append(f"{instruction} (line {number}) is left out: {_MEANINGLESS[instruction]}")
            return
        method = getattr(self, f"_{instruction.lower()}", None)
        if method is None:
            self._refuse(number, f"{instruction} is not an instruction that is known here")
        if "<<" in rest and instruction in ("RUN", "COPY", "ADD") and re.search(r"<<-?['\"]?\w+['\"]?(\s|$)", rest):
            self._refuse(number, f"{instruction} with a heredoc is not supported: put the text into a file and COPY it")
        if instruction not in ("FROM", "ARG") and not self.stages:
            self._refuse(number, f"{instruction} stands before FROM")
        method(number, rest)

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise SandboxError(f"{self.path}, line {number}: {why}")

    def _from(self, number: int, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            self._refuse(number, "FROM takes IMAGE or IMAGE AS NAME")
        name = words[2].lower() if len(words) == 3 else f"stage-{len(self.stages)}"
        if words[0] == "scratch" or words[0].lower() in (stage.name for stage in self.stages):
            self._refuse(number, f"FROM {words[0]}: a definition can only start from an image of a registry")
        lines = [*self.first_args, f"FROM {words[0]} AS {name}", f"RUN {_COPY}"]
        self.stages.append(_Stage(name, lines))

    def _arg(self, number: int, rest: str) -> None:
        if "=" not in rest:
            self.notes.append(f"ARG {rest.strip()} (line {number}) has no default and stays empty")
            return
        if not self.stages:
            self.first_args.append(f"ARG {rest.strip()}")
            return
        self.stages[-1].lines += [f"RUN export {name}={_quoted(value)}" for name, value in self._pairs(number, rest)]

    def _env(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        for name, value in self._pairs(number, rest):
            stage.environment.append(f"{name}={_quoted(value)}")
            stage.lines.append(f"RUN export {name}={_quoted(value)}")

    def _label(self, number: int, rest: str) -> None:
        self.stages[-1].labels += [[name, value.replace("\n", " ")] for name, value in self._pairs(number, rest)]

    def _pairs(self, number: int, rest: str) -> list[tuple[str, str]]:
        if not re.match(r"[^\s=]+=", rest):  # the old form: one name, and all the rest is its value
            name, _, value = rest.strip().partition(" ")
            return [(name, value.strip())]
        try:
            words = shlex.split(rest)
        except ValueError as error:
            self._refuse(number, f"its quotes do not match: {error}")
        if wrong := [word for word in words if "=" not in word]:
            self._refuse(number, f"{wrong[0]!r} is not NAME=VALUE")
        return [(word.partition("=")[0], word.partition("=")[2]) for word in words]

    def _workdir(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        stage.workdir = posixpath.join(stage.workdir, rest.strip().strip("\"'"))
        stage.lines.append(f"WORKDIR {stage.workdir}")

    def _shell(self, number: int, rest: str) -> None:
        self.stages[-1].shell = tuple(self._array(rest)) or self._refuse(number, "SHELL takes a JSON array")

    def _run(self, number: int, rest: str) -> None:
        stage = self.stages[-1]
        while match := re.match(r"--(\w+)=(\S+)\s+", rest):
            if match[1] == "mount" and not re.search(r"type=(cache|tmpfs)", match[2]):
                self._refuse(number, f"RUN --mount={match[2]} is not supported: COPY what it needs")
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
        if len(words) < 2 or any(re.search(r"\s", word) for word in words):
            self._refuse(number, "COPY and ADD take SOURCE… DESTINATION, without white space in them")
        *sources, destination = words
        if "from" in flags:
            sources = [posixpath.join("/", source) for source in sources]
            option = f"--from={self._stage_name(number, flags['from'])} "
        else:
            sources, option = self._local(number, sources), ""
        slash = "/" if destination.endswith(("/", "/.")) or destination == "." or len(sources) > 1 else ""
        target = posixpath.normpath(posixpath.join(stage.workdir, destination)).rstrip("/") + slash
        for source in sources:
            stage.copies += 1
            aside = f"{_ASIDE}/{stage.copies}"
            name = posixpath.basename(source.rstrip("/"))
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

    def _stage_name(self, number: int, given: str) -> str:
        names = [stage.name for stage in self.stages[:-1]]
        if given.isdigit() and int(given) < len(names):
            return names[int(given)]
        if given.lower() not in names:
            self._refuse(number, f"--from={given} is none of the stages before ({', '.join(names) or 'there is none'})")
        return given.lower()

    def _local(self, number: int, sources: list[str]) -> list[str]:
        found: list[str] = []
        for source in sources:
            if re.match(r"(https?|git)://|git@", source):
                self._refuse(number, f"ADD {source}: write RUN curl -fsSL {source} -o FILE")
            paths = sorted(self.directory.glob(posixpath.normpath(source.lstrip("/")) or "."))
            if not paths:
                self._refuse(number, f"there is no {source} in {self.directory}")
            if any(not path.resolve().is_relative_to(self.directory.resolve()) for path in paths):
                self._refuse(number, f"{source} lies outside of {self.directory}")
            found += map(str, paths)
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


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line number, instruction, what follows it), with lines joined and comments taken out as Docker does."""
    found, pending, start = [], "", 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip()):
            if (match := re.match(r"\s*#\s*escape\s*=\s*(\S)", line)) and match[1] != "\\":
                raise SandboxError(f"{path}, line {number}: only \\ can be the escape character")
            continue
        start = start if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        words = (pending + line).strip().split(None, 1)
        found.append((start, words[0].upper(), words[1] if len(words) > 1 else ""))
        pending = ""
    if pending:
        raise SandboxError(f"{path} ends within the instruction of line {start}")
    return found


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
        recipe.environ, recipe.labels = stage.environment, stage.labels
    text: str = SingularityWriter(parser.recipe).convert(runscript="/bin/sh")
    return f"# Converted from {conversion.path.name}\n{text}\n"
