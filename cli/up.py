"""`deepinfer up`: a whole stack as local processes, from the first check to the last cleanup."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.markup import escape

from cli import checks, cores, keeping, ports, probes, runtime, smoke
from cli.child import Child
from cli.console import err, out
from cli.plan import Wanted, plan
from cli.restarts import RestartPolicy
from cli.screen import Screen
from cli.supervisor import LATE, Row, Supervisor
from cli.task import Task

# While something starts, a user watches; after that a look now and then costs next to nothing.
_STARTING_TICK_S = 0.1
_SERVING_TICK_S = 0.4
_LOG_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user asked for; ports of 0 stand for free ones."""

    model: Path
    prefill: int
    decode: int
    http_port: int
    grpc_port: int
    transport: str
    device: str
    preset: str
    smoke: bool
    ready_file: Path | None
    log_dir: Path | None
    grace_s: float
    start_timeout_s: float
    kv_dir: Path | None
    kv_gb: float


def up(options: UpOptions) -> int:
    """Runs a stack until it is told to stop. Exit code: 0 after a drain, 1 when it failed or a smoke had no answer.

    Raises StartError before any work when the model folder is incomplete, a port is taken, an option wrong, or the
    folder of `kv_dir` another stack's.
    """
    checks.model_folder(options.model)
    checks.device(options.device)
    checks.preset(options.preset)
    checks.transport(options.transport)
    checks.different_ports(options.http_port, options.grpc_port)
    checks.port(options.http_port, "--http-port")
    checks.port(options.grpc_port, "--grpc-port")
    if options.ready_file is not None:
        checks.new_file(options.ready_file, "--ready-file")
    if options.kv_dir is not None:
        checks.writable_folder(options.kv_dir, "--kv-dir")
    if options.log_dir is not None:
        checks.writable_folder(options.log_dir, "--log-dir")
    place = runtime.folder()
    checks.writable_folder(place, "XDG_RUNTIME_DIR")
    runtime.sweep(place)
    runtime.require_own(runtime.stacks(place), options.log_dir, options.ready_file)
    with ExitStack() as holding:
        if options.kv_dir is not None:
            holding.enter_context(keeping.held(options.kv_dir))
        folder = holding.enter_context(_private_folder(place / f"stack-{os.getpid()}"))
        return asyncio.run(_Stack(options, place, folder).run())


class _Stack:
    """One run of `deepinfer up`."""

    def __init__(self, options: UpOptions, place: Path, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._logs = options.log_dir or folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._word = [place / f"stack-{os.getpid()}.json", *filter(None, [options.ready_file])]
        self._told: runtime.StackRecord | None = None
        self._supervisor = self._supervise()

    async def run(self) -> int:
        options = self._options
        async with _stop_signals(self._supervisor.kill) as stop, Screen(out, options.model.name) as screen:
            try:
                code = await self._serve(stop, screen)
            finally:
                for path in self._word:
                    with suppress(OSError):  # whatever became of the file, nothing is left running
                        path.unlink(missing_ok=True)
                await self._drain(screen)
        failed = self._supervisor.failed
        return self._report(failed) if failed else code

    def _supervise(self) -> Supervisor:
        options = self._options
        wanted = Wanted(
            model=options.model.resolve(),
            prefill=options.prefill,
            decode=options.decode,
            http_port=options.http_port or ports.free(),
            grpc_port=options.grpc_port or ports.free(),
            transport=options.transport,
            device=options.device,
            preset=options.preset,
            kv_dir=options.kv_dir.resolve() if options.kv_dir is not None else None,
            kv_gb=options.kv_gb,
        )
        tasks = plan(wanted, self._folder, cores.available())
        return Supervisor(tasks, self._start, time.monotonic, RestartPolicy(), options.start_timeout_s)

    async def _start(self, task: Task) -> Child:
        return await Child.start(task.command, task.environment, self._log(task))

    async def _serve(self, stop: asyncio.Event, screen: Screen) -> int:
        """Ticks until something ends it. 1 when the stack failed or the smoke got no answer."""
        while not stop.is_set() and self._supervisor.failed is None:
            await self._supervisor.tick()
            screen.show(self._supervisor.rows())
            if self._supervisor.serving:
                await self._tell()
                if self._options.smoke:
                    return 0 if await smoke.ask(self._row("gateway").endpoints.http, out) else 1
            await _sleep(_SERVING_TICK_S if self._supervisor.serving else _STARTING_TICK_S, stop)
        return 1 if self._supervisor.failed or self._options.smoke else 0

    async def _drain(self, screen: Screen) -> None:
        draining = asyncio.create_task(self._supervisor.drain(self._options.grace_s))
        while not draining.done():
            screen.show(self._supervisor.rows())
            await asyncio.wait([draining], timeout=_STARTING_TICK_S)
        screen.show(self._supervisor.rows())
        draining.result()

    async def _tell(self) -> None:
        """Leaves word of the stack as it stands, when that has changed."""
        rows = self._supervisor.rows()
        pids = {row.task.name: row.pid for row in rows if row.pid is not None}
        if self._told is not None and self._told.pids == pids:
            return
        gateway = self._row("gateway").endpoints
        models = await probes.served_models(gateway.address)
        self._told = runtime.StackRecord(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            http=gateway.http,
            grpc=gateway.address,
            model=models[0].model.name if models else self._options.model.name,
            log_dir=str(self._logs.resolve()),
            pids=pids,
            addresses={row.task.name: row.endpoints.address for row in rows},
            transport=self._options.transport,
        )
        for path in self._word:
            runtime.write_atomically(path, self._told)
        if not out.is_terminal:  # where there is no table that says it
            out.print(f"ready: {self._told.model} at http://{gateway.http}/v1, gRPC at {gateway.address}")

    def _row(self, name: str) -> Row:
        return next(row for row in self._supervisor.rows() if row.task.name == name)

    def _log(self, task: Task) -> Path:
        return self._logs / f"{task.name}.log"

    def _report(self, failed: Row) -> int:
        """Prints the end of the failed process's log: its own last words say what is wrong."""
        tail = self._log(failed.task).read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        err.print(f"[bold red]error[/]: {failed.task.name} failed: {escape(failed.reason)}. The end of its log:")
        for text in tail:
            err.print(f"  {escape(text)}", soft_wrap=True)
        fixes = [f"--start-timeout gives more than {self._options.start_timeout_s:g} s"] * (failed.reason == LATE)
        fixes += ["see the message above"] * bool(tail)
        fixes += ["--log-dir DIR keeps all logs"] * (self._options.log_dir is None)
        if fixes:
            err.print(f"  [bold]fix[/]: {'; '.join(fixes)}")
        return 1


@contextmanager
def _private_folder(path: Path) -> Iterator[Path]:
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def _stop_signals(insist: Callable[[], None]) -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; every further one calls `insist`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if stop.is_set():
            insist()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, asked)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _sleep(duration_s: float, stop: asyncio.Event) -> None:
    """Sleeps unless told to stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await stop.wait()
