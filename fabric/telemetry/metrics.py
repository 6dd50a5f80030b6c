"""Prometheus metrics of one process. Knows the names shared by all services; each service adds its own."""

from __future__ import annotations

import platform
import selectors
import socket
import threading
from importlib import metadata
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.process_collector import ProcessCollector

from fabric.errors import StartError
from fabric.telemetry import logs

_log = logs.get("metrics")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The registry of one process with what every service exports.

    Labels name methods, codes, transports and reasons; never a tenant, a request or a model's output.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self.counter("rpc_requests", "Calls answered", "method", "code")
        self.inflight = self.gauge("rpc_inflight", "Calls being answered", "method")
        self.seconds = self.histogram("rpc_seconds", "Time from arrival to last byte", "method")
        self._build_info = self.gauge("build_info", "1, with what this process runs as labels", "name", "value")
        self.build_info("service", service)
        self.build_info("version", _version())
        self.build_info("python", platform.python_version())

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"deepinfer_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"deepinfer_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"deepinfer_{name}", text, labels, registry=self.registry, buckets=buckets)

    def build_info(self, name: str, value: str) -> None:
        """Exports one fact that was decided at start, such as the kernels or the transport lane chosen."""
        self._build_info.labels(name, value).set(1)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request."""

    daemon_threads = True
    timeout = 0


class _Scrape(WSGIRequestHandler):
    """A request's line goes to this process's log, and there to `debug`: it comes every few seconds."""

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("scraped", peer=self.client_address[0], request=format % args)


class MetricsServer:
    """`GET /metrics` of one registry on its own port and thread, which sleeps until somebody asks."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        """Raises StartError where the port is taken; port 0 takes a free one."""
        try:
            app = make_wsgi_app(metrics.registry)
            self._server = make_server(host, port, app, server_class=_Server, handler_class=_Scrape)
        except OSError as error:
            raise StartError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                field="metrics",
                fix="stop the process that holds the port, or use port 0",
            ) from error
        self.address = f"{host}:{self._server.server_port}"
        self._ended, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Safe to repeat."""
        self._end.close()
        self._thread.join(timeout=2.0)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting, self._server, self._ended:
            waiting.register(self._server, selectors.EVENT_READ)
            waiting.register(self._ended, selectors.EVENT_READ)
            while all(key.fileobj is self._server for key, _ in waiting.select()):
                self._server.handle_request()


def _version() -> str:
    try:
        return metadata.version("deepinfer-serve")
    except metadata.PackageNotFoundError:
        return "source"
