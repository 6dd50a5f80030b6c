"""The chassis of every service: serve, be healthy, register, drain. Knows servicers by their add function alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import uvloop
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from fabric import failpoints, garbage, lifecycle, preflight
from fabric.channels import MAX_MESSAGE_BYTES
from fabric.discovery import Discovery, MemberInfo, open_discovery
from fabric.errors import ServiceError, StartError
from fabric.health import HealthMonitor, Progress
from fabric.http import HttpFront
from fabric.interceptors import CallScope, InFlight
from fabric.preflight import Preflight
from fabric.settings import Loaded, ServiceSettings, SettingsError, load
from fabric.telemetry import logs
from fabric.telemetry.metrics import Metrics, MetricsServer

_log = logs.get("server")
# Seconds between leaving discovery and refusing calls: callers hear of it first.
_LAME_DUCK_S = 0.25
# Seconds that calls without an end of their own (Watch) get when the server stops.
_CUT_S = 0.1
_LOOK_S = 0.05

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Two processes on one port would each get a part of the calls.
    ("grpc.so_reuseport", 0),
    # Without these a burst of about a thousand calls is answered with CANCELLED, which no client retries.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Our channels ping every second to notice a frozen peer; the default answers that with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A frozen caller must not hold its streams for ever.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


@dataclass(frozen=True, slots=True)
class Service:
    """What a service's `build` yields to the chassis.

    servicers: pairs of the generated `add_XServicer_to_server` and the servicer.
    progress: how health sees that work moves; also what a drain waits for.
    members: how to announce this instance, its address left empty; None announces nothing.
    http, http_listen: an ASGI application and its host:port, for services that speak HTTP as well.
    metrics: the registry the service added its own metrics to; None takes a fresh one.
    on_drain: awaited first when a drain begins, so that the service can tell its watchers.
    """

    servicers: Sequence[tuple[Callable[[Any, Any], None], Any]]
    progress: Progress = field(default_factory=Progress)
    members: MemberInfo | None = None
    http: Any | None = None
    http_listen: str = "127.0.0.1:0"
    metrics: Metrics | None = None
    on_drain: Callable[[], Awaitable[None]] | None = None


Build = Callable[[SettingsT], AbstractAsyncContextManager[Service]]


@dataclass(frozen=True, slots=True)
class Ready:
    """What the ready line says: where everything listens."""

    service: str
    instance: str
    address: str
    metrics: str
    http: str
    pid: int

    def line(self) -> str:
        return json.dumps({"event": "ready"} | {name: getattr(self, name) for name in self.__slots__})


class Chassis(Generic[SettingsT]):
    """One running service. Every start step leaves its undoing on a stack before the next begins."""

    def __init__(self, settings: SettingsT, build: Build[SettingsT], check: Preflight[SettingsT] | None = None) -> None:
        self._settings = settings
        self._build, self._check = build, check
        self._stack = AsyncExitStack()
        self._registration = AsyncExitStack()
        self._in_flight = InFlight()
        self._http: HttpFront | None = None
        self._progress = Progress()
        self._health = HealthMonitor(self._progress)
        self._server: Any = None
        self._on_drain: Callable[[], Awaitable[None]] | None = None

    async def start(self) -> Ready:
        """Starts everything and registers; a failure or cancellation on the way leaves nothing behind.

        Raises:
            StartError: a port is taken or a setting cannot be met.
            Unavailable: discovery does not answer within its wait.
        """
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Say so to watchers, NOT_SERVING, leave discovery, let running calls end within `drain_s`, stop listening."""
        if self._on_drain is not None:
            await self._on_drain()
        await self._health.set_ready(False)
        await self._registration.aclose()
        grace_s = self._settings.drain_s
        waits = [self._wait_idle(grace_s)]
        if self._http is not None:
            waits.append(self._http.stop(grace_s))
        await asyncio.gather(*waits)
        await self._server.stop(_CUT_S)
        _log.info("drained", left=self._in_flight.finite)

    async def close(self) -> None:
        """Undoes all steps in reverse; a second call finds nothing to do."""
        await self._stack.aclose()

    async def _start(self) -> Ready:
        settings = self._settings
        preflight.check(settings, self._check)
        discovery = open_discovery(settings.discovery)
        await discovery.ready(settings.discovery_wait_s)
        service = await self._stack.enter_async_context(self._build(settings))
        metrics = service.metrics or Metrics(settings.service_name())
        if service.members is not None:
            logs.identify(service.members.instance)
        self._progress, self._on_drain = service.progress, service.on_drain
        self._health = HealthMonitor(service.progress)
        address = await self._start_server(service, metrics)
        http = await self._start_http(service)
        exporter = MetricsServer(metrics, *lifecycle.split_address(settings.metrics, "metrics"))
        self._stack.push_async_callback(asyncio.to_thread, exporter.close)
        await self._stack.enter_async_context(lifecycle.background(self._health.watch(), "health"))
        await self._health.set_ready(True)
        instance = await self._register(discovery, service, settings.advertise or address)
        return Ready(settings.service_name(), instance, address, exporter.address, http, os.getpid())

    async def _start_server(self, service: Service, metrics: Metrics) -> str:
        """Returns the host:port that the server took."""
        server = self._server = grpc.aio.server(
            interceptors=[CallScope(metrics, self._in_flight)], options=list(SERVER_OPTIONS)
        )
        recorder: Any = _Names(server)
        for add, servicer in (*service.servicers, (add_HealthServicer_to_server, self._health.servicer)):
            add(servicer, recorder)
        names = tuple(recorder.added)
        await self._health.start(names)
        if self._settings.reflection:
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        host, _ = lifecycle.split_address(self._settings.listen, "listen")
        try:
            port = server.add_insecure_port(self._settings.listen)
        except RuntimeError as error:
            raise lifecycle.port_error(self._settings.listen, "listen") from error
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return f"{host}:{port}"

    async def _start_http(self, service: Service) -> str:
        if service.http is None:
            return ""
        self._http = HttpFront(service.http, service.http_listen)
        await self._http.start()
        self._stack.push_async_callback(self._http.stop, 0.0)
        return self._http.address

    async def _register(self, discovery: Discovery, service: Service, address: str) -> str:
        """Returns the instance's name."""
        self._stack.push_async_callback(self._registration.aclose)
        if service.members is None:
            return self._settings.instance
        await self._registration.enter_async_context(discovery.register(service.members.at(address)))
        return service.members.instance

    async def _wait_idle(self, grace_s: float) -> None:
        await asyncio.sleep(min(_LAME_DUCK_S, grace_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._in_flight.idle()
                while self._progress.pending():  # noqa: ASYNC110  # another thread's counter
                    await asyncio.sleep(_LOOK_S)


def run(cls: type[SettingsT], build: Build[SettingsT], check: Preflight[SettingsT] | None = None) -> NoReturn:
    """The whole life of a service process, from its command line to its exit code.

    check: what this service's start needs of its settings beside what every service's does; `--check` runs both
    and no more.
    0 after a drain, 1 when it could not start, 2 for wrong settings.
    """
    name = cls.service_name()
    try:
        loaded = load(cls, sys.argv[1:], prog=f"python -m services.{name}")
    except SettingsError as error:
        sys.exit(_complain(error, 2))
    if loaded.print_config:
        print(json.dumps(loaded.settings.printable(), indent=2))
        sys.exit(0)
    try:
        if loaded.check:
            preflight.check(loaded.settings, check)
            print("settings are valid")
        else:
            uvloop.run(_main(loaded.settings, build, check))
    except ServiceError as error:
        _leave(_complain(_spelled(error, loaded), 1))
    _leave(0)


def _spelled(error: ServiceError, loaded: Loaded[SettingsT]) -> ServiceError:
    """The error, its setting called as the user called it."""
    return StartError(error.message, field=loaded.spelled(error.field), fix=error.fix)


async def _main(settings: SettingsT, build: Build[SettingsT], check: Preflight[SettingsT] | None) -> None:
    logs.configure(settings.service_name(), settings.instance, settings.log_level)
    failpoints.arm(settings.failpoints)
    stop = lifecycle.stop_on_signals()
    chassis = Chassis(settings, build, check)
    starting = asyncio.create_task(chassis.start())
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()  # asked to stop before it was ready: undo what was started
        await asyncio.wait([starting])
        _leave(0)  # a thread that loads or compiles has nothing to finish, and would be waited for
    ready = await starting
    garbage.spare_what_stays()
    try:
        _announce(ready, settings.ready_file)
        await asked
        await chassis.drain()
    finally:
        await chassis.close()


def _announce(ready: Ready, file: Path | None) -> None:
    """The ready file, whole or not at all; then the ready line on stdout. Raises StartError without a place for it."""
    if file is not None:
        part = file.with_name(file.name + ".part")
        try:
            part.write_text(ready.line())
            part.replace(file)
        except OSError as error:
            fix = "name a file in a folder that exists, is writable and has room"
            raise StartError(f"cannot write {file}: {error.strerror}", field="ready_file", fix=fix) from error
    print(ready.line(), flush=True)


def _leave(code: int) -> NoReturn:
    """All is closed. What is left are destructors of native libraries, some of which crash (libnl of NIXL's wheel)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _complain(error: ServiceError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


class _Names:
    """Stands between generated `add_XServicer_to_server` functions and a server, noting what was added."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.added: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        self.added.append(service_name)
        self._server.add_registered_method_handlers(service_name, handlers)
