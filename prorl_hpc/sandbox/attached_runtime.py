"""The runtime of attached sandboxes: limits on starting, retries, sweeping, closing.

What makes a child process a sandbox (a container, or nothing) is the subclass's business.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import tools
from prorl_hpc.sandbox.attached import AttachedSandbox, ServerSettings
from prorl_hpc.sandbox.directories import Box, Holding, remove_tree, sweep
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

log = logging.getLogger(__name__)

LIMITS = ("max_processes", "max_memory_mib", "max_disk_mib", "max_file_mib")
CODE = Path(tools.__file__).parent
SHELL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class StartFailed(SandboxError):
    """A start that may work when tried again."""


@dataclass(frozen=True)
class Launch:
    """How to start one sandbox's process."""

    argv: list[str]
    env: dict[str, str]
    settings: ServerSettings


class AttachedRuntime(abc.ABC):
    """What the apptainer and local runtimes share."""

    def __init__(self, config: SandboxConfig, runtime_dir: Path) -> None:
        self._config = config
        self._runtime_dir = runtime_dir
        self._holding: Holding | None = None
        self._starting = asyncio.Semaphore(config.start_limit)
        self._sandboxes: dict[str, AttachedSandbox] = {}
        self._closed = False

    @property
    @abc.abstractmethod
    def description(self) -> str: ...

    @abc.abstractmethod
    async def _prepare(self, holding: Path) -> None:
        """Find what is needed, make the default image below ``holding``. SandboxError says what is missing."""

    @abc.abstractmethod
    def _launch(self, spec: SandboxSpec, box: Box) -> Launch: ...

    def _explain(self, reason: str) -> str:
        """A failed start's reason, with what to do about it where that is known."""
        return reason

    async def prepare(self) -> None:
        if self._holding is not None:
            return
        for path in await asyncio.to_thread(sweep, self._runtime_dir):
            log.info("removed %s, which a dead run left", path)
        self._holding = Holding(self._runtime_dir)
        try:
            await self._prepare(self._holding.path)
            trial = await self._start_once(SandboxSpec("trial"))
            await trial.stop()
        except BaseException:
            self._holding.release()
            self._holding = None
            raise

    async def start(self, spec: SandboxSpec) -> Sandbox:
        check_spec(spec)
        if self._holding is None:
            raise SandboxError("the sandbox runtime was not prepared" if not self._closed else "the runtime is closed")
        attempts = self._config.start_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                async with self._starting:
                    return await self._start_once(spec)
            except StartFailed as error:
                log.warning("sandbox %s, start %d of %d: %s", spec.sandbox_id, attempt, attempts, error)
                if attempt == attempts:
                    raise SandboxError(
                        f"sandbox {spec.sandbox_id} did not start in {attempts} attempts; the last: {error}"
                    ) from error
                await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _start_once(self, spec: SandboxSpec) -> AttachedSandbox:
        if self._holding is None:
            raise SandboxError("the runtime is closed")
        box = self._holding.make_box(spec.sandbox_id)
        try:
            launch = self._launch(spec, box)
            process = await _spawn(launch, box)
        except BaseException:
            remove_tree(box.path)
            raise
        sandbox = AttachedSandbox(spec.sandbox_id, box, process)
        # Known to ``close`` from here on, ready or not.
        self._sandboxes = {name: kept for name, kept in self._sandboxes.items() if not kept.stopped}
        self._sandboxes[spec.sandbox_id] = sandbox
        try:
            if self._closed:
                raise SandboxError("the runtime is closed")
            await sandbox.attach(launch.settings, self._config.start_timeout_s)
        except SandboxError as error:
            await sandbox.stop()
            raise StartFailed(self._explain(str(error))) from error
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox

    async def close(self) -> None:
        self._closed = True
        holding, self._holding = self._holding, None
        if holding is None:
            return
        results = await asyncio.gather(*(s.stop() for s in self._sandboxes.values()), return_exceptions=True)
        failures = [str(result) for result in results if isinstance(result, BaseException)]
        if failures:
            raise SandboxError(f"{len(failures)} sandboxes did not stop: {'; '.join(failures[:3])}")
        self._sandboxes.clear()
        holding.release()

    def _settings(self, root: str, scratch: str, env: dict[str, str], *, inherit_env: bool) -> ServerSettings:
        config = self._config
        limits = {name: getattr(config, name) for name in LIMITS}
        return ServerSettings(
            root,
            scratch,
            env,
            inherit_env,
            config.output_limit_bytes,
            strip_ansi=config.strip_ansi,
            ipython_mode=config.ipython,
            open_paths=config.open_paths,
            limits=limits,
        )


async def _spawn(launch: Launch, box: Box) -> asyncio.subprocess.Process:
    with box.log.open("wb") as stderr:
        try:
            return await asyncio.create_subprocess_exec(
                *launch.argv,
                env=launch.env,
                cwd=box.path,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(f"{launch.argv[0]} cannot be started: {error}") from error


def check_spec(spec: SandboxSpec) -> None:
    """Raises SandboxError for what no runtime can start."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", spec.sandbox_id):
        raise SandboxError(
            f"sandbox id {spec.sandbox_id!r} is not file-name safe: letters, digits, '.', '_', '-', at most 128"
        )
    for what, value, allowed in (
        ("network", spec.network, ("none", "host")),
        ("writable", spec.writable, ("workspace", "image")),
    ):
        if value and value not in allowed:
            raise SandboxError(f"sandbox {what} {value!r} is unknown; allowed: {', '.join(allowed)}")
    for name, value in spec.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise SandboxError(f"sandbox environment variable {name!r} has a name or value that no process can take")
