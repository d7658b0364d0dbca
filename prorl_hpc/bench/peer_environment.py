"""Peers live in virtual environments of their own under the user's cache: none is a dependency of ours.

``python -m prorl_hpc.bench.peer_environment DIRECTORY`` makes the one with TRL in a directory of your choice.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.messages.errors import RunError

TRL_PACKAGES = Path(__file__).parent / "peers" / "trl.txt"
"""TRL and what it needs beside us, pinned."""
_INSTALL_S = 900.0


def peer_environment(package: str, version: str, say: Callable[[str], None]) -> Path:
    """The environment with ``package``, made with pip when it is missing. RunError says why it cannot be."""
    directory = prorl_home() / "peers" / f"{package}-{version}"
    complete = directory / "complete"
    if not complete.exists():
        say(f"installing {package} {version} in {directory} (once)")
        _make(package, directory)
        _pip_install(package, directory, f"{package}=={version}")
        complete.touch()
    return directory


def trl_environment(say: Callable[[str], None], directory: Path | None = None) -> Path:
    """An environment with TRL that sees the packages of this one too, so that both trainers run on the same torch and
    transformers (and 2 GB are not installed twice). Run its ``bin/python``.

    It is made anew when the pinned list, or the environment that it leans on, is another than before. RunError says why
    it cannot be made."""
    if absent := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise RunError(f"TRL needs {' and '.join(absent)}: install this package with its extra [train]")
    directory = directory or prorl_home() / "peers" / "trl"
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    made_of = hashlib.sha256(repr((TRL_PACKAGES.read_text(), sys.prefix, sys.version, ours)).encode()).hexdigest()
    complete = directory / "complete"
    if not complete.exists() or complete.read_text() != made_of:
        say(f"installing TRL in {directory} (once, about 100 MB)")
        _make("TRL", directory)
        _pip_install("TRL", directory, "--no-deps", "-r", str(TRL_PACKAGES))
        # Behind its own packages in the path. addsitedir, and not the bare path, so that editable installs are seen too.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in ours]
        (_site_packages(directory) / "packages_of_prorl_hpc.pth").write_text("".join(lines))
        complete.write_text(made_of)
    return directory


def _make(package: str, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    _command(package, sys.executable, "-m", "venv", "--clear", str(directory))


def _pip_install(package: str, directory: Path, *what: str) -> None:
    _command(package, str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *what)


def _site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _command(package: str, *words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{package} cannot be installed: {error}") from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word"]
        raise RunError(
            f"{package} cannot be installed: {' '.join(words[:4])} … ended with {done.returncode}: {last[0]}"
        )


def main() -> int:
    try:
        trl_environment(print, Path(sys.argv[1]).resolve())
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
