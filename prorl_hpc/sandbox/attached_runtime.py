"""The runtime of attached sandboxes: limits on starting, retries, sweeping, closing.

What makes a child process a sandbox (a container, or nothing) is the subclass's business.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import itertools
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import tools
from prorl_hpc.sandbox.attached import AttachedSandbox, ServerSettings
from prorl_hpc.sandbox.cgroups import Cgroups, group_name
from prorl_hpc.sandbox.directories import Box, Holding, remove_tree, space_left, words_of
from prorl_hpc.sandbox.leftovers import record_session, sweep
from prorl_hpc.sandbox.limits import group_limits, server_limits
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec
from prorl_hpc.sandbox.start_slots import StartSlots
from prorl_hpc.sandbox.warm_pool import WarmPool

log = logging.getLogger(__name__)

CODE = Path(tools.__file__).parent
_SHELL_S = 20.0
_TAKEN = ("/.prorl", "/workspace", "/proc", "/sys", "/dev", "/etc")
"""Where no directory of the node may be bound. (/tmp may hold one: a virtual environment of a test lies there.)"""
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
        self._runtime_dir = runtime_dir.absolute()  # sandboxes are started in directories of their own
        self._holding: Holding | None = None
        self._slots = StartSlots(config.start_limit, config.start_timeout_s)
        self._sandboxes: dict[str, AttachedSandbox] = {}
        self._warm: WarmPool | None = None
        self._warm_numbers = itertools.count(1)
        self._begun: set[str] = set()
        self._starting: set[asyncio.Event] = set()
        self._closed = False
        self._groups = Cgroups()

    @property
    @abc.abstractmethod
    def description(self) -> str: ...

    @abc.abstractmethod
    async def _prepare(self, holding: Path) -> None:
        """Find what is needed, make the default image below ``holding``. SandboxError says what is missing."""

    @abc.abstractmethod
    async def _launch(self, spec: SandboxSpec, box: Box) -> Launch:
        """SandboxError for what would fail again."""
        ...

    @abc.abstractmethod
    async def _let_go(self) -> None:
        """Of what ``_prepare`` took outside its holding."""

    def _explain(self, reason: str) -> str:
        """A failed start's reason, with what to do about it where that is known."""
        return reason

    async def prepare(self) -> None:
        if self._holding is not None:
            return
        _check_choices(self._config.network, self._config.writable)
        self._groups = await asyncio.to_thread(Cgroups.find)
        for path in await asyncio.to_thread(sweep, self._runtime_dir):
            log.info("removed %s, which a dead run left", path)
        self._holding = Holding(self._runtime_dir)
        try:
            await self._prepare(self._holding.path)
            trial = await self._start_warm()
            await _try_shell(trial)
        except BaseException as error:
            full = space_left(self._runtime_dir)
            await self._end()
            if isinstance(error, OSError):
                raise SandboxError(f"no sandbox can be started: {words_of(error)}{full}") from error
            raise
        self._warm = WarmPool(self._config.warm, self._start_warm)
        if self._config.warm:
            self._warm.add(trial)
        else:
            await trial.stop()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        check_spec(spec)
        if self._holding is None:
            raise SandboxError("the sandbox runtime was not prepared" if not self._closed else "the runtime is closed")
        there = self._sandboxes.get(spec.sandbox_id)
        if (there is not None and not there.stopped) or spec.sandbox_id in self._begun:
            raise SandboxError(f"there is a sandbox {spec.sandbox_id!r} already, or it was not stopped")
        if warm := self._take_warm(spec):
            return warm
        self._begun.add(spec.sandbox_id)
        try:
            return await self._start_cold(spec)
        finally:
            self._begun.discard(spec.sandbox_id)

    async def _start_cold(self, spec: SandboxSpec) -> AttachedSandbox:
        attempts = self._config.start_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                async with self._slots.slot():
                    return await self._start_once(spec.sandbox_id, spec)
            except StartFailed as error:
                log.warning("sandbox %s, start %d of %d: %s", spec.sandbox_id, attempt, attempts, error)
                if attempt == attempts:
                    raise SandboxError(
                        f"sandbox {spec.sandbox_id} did not start in {attempts} attempts; the last: {error}"
                    ) from error
                await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _take_warm(self, spec: SandboxSpec) -> AttachedSandbox | None:
        """A sandbox that is ready, where the spec asks for nothing but the defaults."""
        config = self._config
        asked = (spec.image or config.image, spec.network or config.network, spec.writable or config.writable)
        special = asked != (config.image, config.network, config.writable) or spec.env or spec.sockets or spec.binds
        if self._warm is None or special:
            return None
        sandbox = self._warm.take()
        if sandbox is not None:
            del self._sandboxes[sandbox.sandbox_id]
            sandbox.name(spec.sandbox_id)
            self._sandboxes[spec.sandbox_id] = sandbox
        return sandbox

    async def _start_warm(self) -> AttachedSandbox:
        """With a name that no worker can give."""
        async with self._slots.slot():
            return await self._start_once(f"ready {next(self._warm_numbers)}", SandboxSpec("ready"))

    async def _start_once(self, name: str, spec: SandboxSpec) -> AttachedSandbox:
        if self._holding is None or self._closed:
            raise SandboxError("the runtime is closed")
        ended = asyncio.Event()
        self._starting.add(ended)
        try:
            return await self._start_in(self._holding.make_box(), name, spec)
        finally:
            self._starting.discard(ended)
            ended.set()

    async def _start_in(self, box: Box, name: str, spec: SandboxSpec) -> AttachedSandbox:
        sandbox = None
        try:
            launch = await self._launch(spec, box)
            spawning = asyncio.create_task(_spawn(launch, box))
            try:
                await asyncio.wait({spawning})
            finally:  # cancelled or not: a process that nobody knows is never stopped
                sandbox = self._known(name, box, await spawning)
            if self._closed:
                raise SandboxError("the runtime is closed")
            record_session(box, sandbox.pid)
            await sandbox.attach(launch.settings, self._config.start_timeout_s)
        except BaseException as error:
            full = space_left(box.path)
            if sandbox is None:
                remove_tree(box.path)
            else:
                await sandbox.stop()
            if isinstance(error, OSError) or (isinstance(error, SandboxError) and sandbox is not None):
                what = "its process cannot be started: " if sandbox is None else ""
                raise StartFailed(self._explain(f"{what}{words_of(error)}{full}")) from error
            raise
        return sandbox

    def _known(self, name: str, box: Box, process: asyncio.subprocess.Process) -> AttachedSandbox:
        """What ``close`` stops from here on, ready or not."""
        make_group = functools.partial(self._groups.make, group_name(box.path), group_limits(self._config), box.groups)
        sandbox = AttachedSandbox(name, box, process, make_group)
        self._sandboxes = {name: kept for name, kept in self._sandboxes.items() if not kept.stopped}
        self._sandboxes[name] = sandbox
        return sandbox

    async def close(self) -> None:
        self._closed = True
        if self._warm is not None:
            await self._warm.close()
        await self._end()

    async def _end(self) -> None:
        """Stop what runs and what is being started, and let go of what is held. SandboxError when something stays."""
        holding, self._holding = self._holding, None
        if holding is None:
            return
        # A start that finds its sandbox stopped, or the runtime closed, ends soon.
        while True:
            results = await asyncio.gather(*(s.stop() for s in self._sandboxes.values()), return_exceptions=True)
            if not self._starting:
                break
            await asyncio.gather(*(ended.wait() for ended in self._starting))
        failures = [str(result) for result in results if isinstance(result, BaseException)]
        if failures:
            raise SandboxError(f"{len(failures)} sandboxes did not stop: {'; '.join(failures[:3])}")
        self._sandboxes.clear()
        await self._let_go()
        holding.release()

    def _settings(self, root: str, scratch: str, env: dict[str, str], *, inherit_env: bool) -> ServerSettings:
        config = self._config
        return ServerSettings(
            root,
            scratch,
            env,
            inherit_env,
            config.output_limit_bytes,
            strip_ansi=config.strip_ansi,
            ipython_mode=config.ipython,
            open_paths=config.open_paths,
            limits=server_limits(config),
            shell=config.shell,
            tmux_poll_s=config.tmux_poll_s,
        )


async def _try_shell(trial: AttachedSandbox) -> None:
    """A sandbox is ready when its tool server answers; that a shell starts in it is tried once."""
    result = await trial.call("bash", {"command": "true"}, _SHELL_S)
    if result.exit_code != 0:
        raise SandboxError(f"the shell of a sandbox does not work: {result.output.strip()}")


def socket_environment(sockets: dict[str, str]) -> dict[str, str]:
    """``sockets``: name → path inside."""
    return {f"PRORL_SOCKET_{name.upper()}": path for name, path in sockets.items()}


async def _spawn(launch: Launch, box: Box) -> asyncio.subprocess.Process:
    with box.log.open("wb") as stderr:
        return await asyncio.create_subprocess_exec(
            *launch.argv,
            env=launch.env,
            cwd=box.path,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )


def check_spec(spec: SandboxSpec) -> None:
    """Raises SandboxError for what no runtime can start."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", spec.sandbox_id):
        raise SandboxError(
            f"sandbox id {spec.sandbox_id!r} is not file-name safe: letters, digits, '.', '_', '-', at most 128"
        )
    _check_choices(spec.network or "none", spec.writable or "workspace")
    for name, path in spec.sockets.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name):
            raise SandboxError(
                f"sandbox socket name {name!r}: a lower-case letter, then letters, digits or '_', at most 31"
            )
        if not Path(path).is_socket():
            raise SandboxError(f"sandbox socket {name}: there is no Unix socket at {path}")
    for path, inside in spec.binds.items():
        if not Path(path).is_dir() or not path.startswith("/"):
            raise SandboxError(
                f"sandbox bind {path}: there is no such directory on this node (an absolute path is needed)"
            )
        check_place_of_bind(inside)
    for name, value in spec.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise SandboxError(f"sandbox environment variable {name!r} has a name or value that no process can take")


def check_place_of_bind(inside: str) -> None:
    """SandboxError for a place where a bound directory would hide what the sandbox itself needs."""
    path = Path(inside)
    taken = next((place for place in _TAKEN if path.is_relative_to(place)), None)
    if not path.is_absolute() or ".." in path.parts or path == Path("/") or taken:
        why = f"{taken} is the sandbox's own" if taken else "an absolute path other than / is needed"
        raise SandboxError(f"sandbox bind to {inside!r}: {why}; choose a path such as /opt/agent")


def _check_choices(network: str, writable: str) -> None:
    for what, value, allowed in (
        ("network", network, ("none", "host")),
        ("writable", writable, ("workspace", "image")),
    ):
        if value not in allowed:
            raise SandboxError(f"sandbox {what} {value!r} is unknown; allowed: {', '.join(allowed)}")
