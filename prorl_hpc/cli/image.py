"""``prorl-hpc image build|pull|list|verify|convert|remove``: the images of sandboxes, in a cache that all nodes see."""

from __future__ import annotations

import argparse
import difflib
import time
from collections.abc import Iterable
from dataclasses import replace

from prorl_hpc.cli import image_conversion
from prorl_hpc.cli.image_words import size_text, tell
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.builder_error import BuilderError
from prorl_hpc.sandbox.images.building import BuildOptions, build, pull
from prorl_hpc.sandbox.images.cache import Entry, ImageCache, Progress
from prorl_hpc.sandbox.images.definitions import Definition, load_definition, needed_base, rebase
from prorl_hpc.sandbox.images.references import (
    Reference,
    check_name,
    docker_reference,
    is_name,
    parse_reference,
    read_reference,
)
from prorl_hpc.sandbox.images.resolving import SHIPPED

VERBS = ("build", "pull", "list", "verify", "convert", "remove")


def main(argv: list[str]) -> int:
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        near = difflib.get_close_matches(argv[0], VERBS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no verb {argv[0]}; {hint}verbs: {', '.join(VERBS)}")
    args = parser.parse_args(argv)
    cache = ImageCache()
    if args.verb == "list":
        return _list(cache)
    if args.verb == "verify":
        return _verify(cache, args.names)
    if args.verb == "remove":
        return _remove(cache, args.names)
    for number in ("jobs", "tries", "timeout"):
        if getattr(args, number, 1) <= 0:
            raise ConfigError(f"--{number} takes a number above 0")
    options = BuildOptions(timeout_s=args.timeout, no_https=getattr(args, "no_https", False))
    options = replace(options, flags=tuple(getattr(args, "flag", ())))
    options = replace(options, force=getattr(args, "force", False), fakeroot=not getattr(args, "no_fakeroot", False))
    if args.verb == "convert":
        return image_conversion.run(args, cache, options)
    return _pull(cache, args, options) if args.verb == "pull" else _build(cache, args, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prorl-hpc image", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    making = verbs.add_parser("build", help="build base, coding, tiny, a .def file or a Dockerfile")
    making.add_argument("source", help=f"{', '.join(SHIPPED)}, a .def file, a Dockerfile, or a directory with one")
    making.add_argument("--name", default="", help="the image's name in the cache (default: the file's)")
    making.add_argument(
        "--from",
        dest="base",
        default="",
        help="build on this instead: a reference, a .sif, a name, debootstrap[:MIRROR]",
    )
    making.add_argument("--no-fakeroot", action="store_true", help="do not act as root within the build")
    making.add_argument(
        "--show", action="store_true", help="print the definition (of a Dockerfile: converted), build nothing"
    )
    pulling = verbs.add_parser("pull", help="bring images of registries or archives into the cache")
    pulling.add_argument(
        "references", nargs="+", metavar="REFERENCE", help="docker://NAME:TAG, oras://…, docker-archive:FILE"
    )
    verbs.add_parser("list", help="what is in the cache")
    check = verbs.add_parser("verify", help="read images and compare them with their checksums")
    check.add_argument("names", nargs="*", metavar="NAME", help="names or references (default: all)")
    many = verbs.add_parser("convert", help="bring all images of a dataset into the cache; can be stopped and resumed")
    image_conversion.add_arguments(many)
    removing = verbs.add_parser("remove", help="remove images from the cache")
    removing.add_argument("names", nargs="+", metavar="NAME", help="names or references")
    for verb in (making, pulling):
        verb.add_argument("--force", action="store_true", help="make it again although it is there")
    for verb in (pulling, many):
        verb.add_argument("--no-https", action="store_true", help="the registry speaks plain http")
    making.add_argument(
        "--flag", action="append", default=[], help="for apptainer build itself, such as --flag=--notest"
    )
    for verb in (making, pulling, many):
        verb.add_argument(
            "--timeout", type=float, default=3600.0, metavar="S", help="seconds per image (default: 3600)"
        )
    return parser


def _build(cache: ImageCache, args: argparse.Namespace, options: BuildOptions) -> int:
    try:
        check_name(args.name or "unnamed")
    except SandboxError as error:
        raise ConfigError(f"--name: {error}") from None
    definition = load_definition(args.source)
    if args.base:
        base_of_base = _prepare_base(cache, definition, args.base, options)
        definition = replace(definition, text=rebase(definition.text, base_of_base, cache))
    elif needed := needed_base(definition):
        if cache.find(needed) is None and needed in SHIPPED and not args.show:
            tell(f"{definition.name} is built on {needed}, which comes first")
            _make(cache, load_definition(needed), needed, options)
        if not args.show or cache.find(needed):
            definition = replace(definition, text=rebase(definition.text, needed, cache))
    if args.show:
        _note(definition, definition.name)
        print(definition.text)
        return 0
    _make(cache, definition, args.name or definition.name, options)
    return 0


def _prepare_base(cache: ImageCache, definition: Definition, base: str, options: BuildOptions) -> str:
    """``build coding --from debootstrap``: what it is built on is built so; the rest of it needs nothing else."""
    needed = needed_base(definition)
    if needed not in SHIPPED or (is_name(base) and base != "debootstrap"):
        return base
    below = load_definition(needed)
    _make(cache, replace(below, text=rebase(below.text, base, cache)), needed, replace(options, force=False))
    return needed


def _make(cache: ImageCache, definition: Definition, name: str, options: BuildOptions) -> None:
    _note(definition, name)
    try:
        entry, made = build(cache, name, definition, _progress(name), options)
    except BuilderError as error:
        raise SandboxError(error.brief) from error
    _told(cache, entry, made)


def _note(definition: Definition, name: str) -> None:
    for note in definition.notes:
        tell(f"{name}: {note}")


def _pull(cache: ImageCache, args: argparse.Namespace, options: BuildOptions) -> int:
    """Each that can be had; what failed is told at the end, too."""
    references = _references(args.references)
    failed: list[tuple[Reference, str]] = []
    for reference in references:
        try:
            entry, made = pull(cache, reference, _progress(reference.cache_name), options)
        except SandboxError as error:
            why = error.brief if isinstance(error, BuilderError) else str(error)
            failed.append((reference, why))
            if len(references) > 1:
                tell(f"{reference.cache_name}: {why}")
        else:
            _told(cache, entry, made)
    if failed and len(references) == 1:
        raise SandboxError(failed[0][1])
    if failed:
        names = ", ".join(str(reference) for reference, _ in failed)
        raise SandboxError(f"{len(failed)} of {len(references)} images could not be pulled: {names}")
    return 0


def _references(texts: list[str]) -> list[Reference]:
    """Each once. ConfigError with all that are none."""
    found, wrong = {}, []
    for text in texts:
        try:
            reference = read_reference(text)
            found[str(reference)] = reference
        except SandboxError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return list(found.values())


def _told(cache: ImageCache, entry: Entry, made: bool) -> None:
    if not made:
        tell(f"{entry.name} is in the cache already (--force makes it again)")
    print(f"{cache.path(entry.name)}")
    tell(f"use it with sandbox.image={entry.name if entry.source_sha256 else entry.reference}")


def _list(cache: ImageCache) -> int:
    """Shows what is there without reading the images; ``verify`` reads them."""
    rows = []
    for name in cache.names():
        entry = cache.find(name)
        if entry is None:
            rows.append((name, size_text(_size(cache, name)), "", "", "not whole: see `image verify`"))
            continue
        age = _age(time.time() - entry.created)
        rows.append((name, size_text(entry.size), age, entry.architecture, entry.reference))
    making = [p.name[1:].removesuffix(".lock") for p in sorted(cache.directory.glob(".*.lock"))]
    rows += [(name, "", "", "", "being made now, or left by a process that died") for name in making]
    if not rows:
        print(f"{cache.directory} is empty: `prorl-hpc image build base`, or `prorl-hpc image pull docker://…`")
        return 0
    print(_table([("NAME", "SIZE", "AGE", "FOR", "FROM"), *rows]))
    names = cache.names()
    strange = len(names) - len(cache.entries())
    told = f" ({strange} of them not whole)" if strange else ""
    total = size_text(sum(_size(cache, name) for name in names))
    print(f"{len(names)} image{'s' * (len(names) != 1)}{told}, {total} in {cache.directory}")
    return 0


def _size(cache: ImageCache, name: str) -> int:
    """Bytes of the file, whatever is known of it."""
    path = cache.directory / f"{name}.sif"
    return path.stat().st_size if path.exists() else 0


def _verify(cache: ImageCache, given: list[str]) -> int:
    names = [_known(cache, text) for text in given] or cache.names()
    wrong = 0
    for name in names:
        try:
            entry = cache.verify(name)
            print(
                f"{name}: sound ({size_text(entry.size)}, {entry.architecture}, sha256 {entry.sha256[:12]}…)",
                flush=True,
            )
        except SandboxError as error:
            wrong += 1
            print(f"{name}: {error}", flush=True)
    print(f"{len(names) - wrong} sound, {wrong} not")
    return 1 if wrong else 0


def _remove(cache: ImageCache, given: list[str]) -> int:
    for name in [_known(cache, text) for text in given]:
        print(f"{name}: removed, {size_text(cache.remove(name))} are free")
    cache.sweep()
    return 0


def _known(cache: ImageCache, text: str) -> str:
    """The name in the cache of a name or reference."""
    names = cache.names()
    if text in names:
        return text
    reference = parse_reference(text) or docker_reference(text)
    if reference and reference.cache_name in names:
        return reference.cache_name
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "`prorl-hpc image list` shows what is there"
    raise ConfigError(f"there is no image {text} in {cache.directory}; {hint}")


def _progress(name: str) -> Progress:
    return lambda line: tell(f"{name}: {line}")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name}"
    return "now"
