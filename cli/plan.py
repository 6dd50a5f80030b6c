"""Turns what the user asked for into the processes of a local stack. Knows command lines, starts nothing."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from cli import backends, cores, ports, probes
from cli.task import Task


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stack as the user asked for it. Ports are resolved: 0 stands for none any more."""

    model: Path
    prefill: int
    decode: int
    http_port: int
    grpc_port: int
    preset: str = ""


def plan(wanted: Wanted, folder: Path, available_cores: int) -> list[Task]:
    """All processes: etcd and Redis first, then the services, whose own start order does not matter.

    folder: private, for configuration, ready files and etcd's data.
    """
    etcd_port, redis_port, password = ports.free(), ports.free(), secrets.token_urlsafe(24)
    house = _House(wanted, folder, f"etcd://{ports.LOOPBACK}:{etcd_port}")
    index = {"DEEPINFER_KVSTORE_INDEX": f"redis://:{password}@{ports.LOOPBACK}:{redis_port}/0"}
    gateway = ("--listen", f"{ports.LOOPBACK}:{wanted.grpc_port}", "--http", f"{ports.LOOPBACK}:{wanted.http_port}")
    model = ("--model", str(wanted.model))
    division = cores.divide(available_cores, wanted.prefill, wanted.decode)
    return [
        backends.etcd(folder, etcd_port),
        backends.redis(folder, redis_port, password),
        house.service("kvstore", environment=index),
        house.service("recipe", model),
        *(house.worker("prefill", i, model, threads) for i, threads in enumerate(division.prefill)),
        *(house.worker("decode", i, model, threads) for i, threads in enumerate(division.decode)),
        house.service("gateway", gateway, drain_rank=0),
    ]


@dataclass(frozen=True, slots=True)
class _House:
    """What all services of one stack share."""

    wanted: Wanted
    folder: Path
    discovery: str

    def worker(self, service: str, index: int, arguments: tuple[str, ...], threads: int) -> Task:
        arguments = (*arguments, "--threads", str(threads))
        return self.service(service, arguments, name=f"{service}-{index}", threads=threads)

    def service(
        self,
        service: str,
        arguments: tuple[str, ...] = (),
        *,
        name: str = "",
        environment: dict[str, str] | None = None,
        threads: int = 1,
        drain_rank: int = 1,
    ) -> Task:
        """A service of ours; workers and stores drain after the gateway, which still needs them."""
        name = name or service
        ready = self.folder / f"{name}.ready"
        reset, probe = probes.ready_file(ready)
        preset = ("--preset", self.wanted.preset) if self.wanted.preset else ()
        command = (sys.executable, "-m", f"services.{service}", "--discovery", self.discovery)
        return Task(
            name=name,
            service=service,
            command=(*command, "--ready-file", str(ready), *preset, *arguments),
            reset=reset,
            probe=probe,
            environment=cores.environment(threads) | (environment or {}),
            needs=("etcd", "redis"),
            drain_rank=drain_rank,
            threads=threads,
        )
