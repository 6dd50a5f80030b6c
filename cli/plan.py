"""Turns what the user asked for into the processes of a local stack. Knows command lines, starts nothing."""

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cli import backends, cores, keeping, ports, probes
from cli.task import Task

# How a service ends that refuses its settings, before anything else.
_WRONG_SETTINGS = "exit code 2"
_SALT = "DEEPINFER_GATEWAY_SALT_SECRET"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stack as the user asked for it, with real ports: a restarted gateway must be found where it was."""

    model: Path
    prefill: int
    decode: int
    http_port: int
    grpc_port: int
    transport: str = "ucx://"
    device: str = "cpu"
    preset: str = ""
    kv_dir: Path | None = None
    kv_gb: float = 8.0

    @property
    def disk(self) -> tuple[str, ...]:
        """Options of a kvstore that keeps its records beyond this stack."""
        if self.kv_dir is None:
            return ()
        return "--nvme-dir", str(keeping.blocks(self.kv_dir)), "--nvme-gb", f"{self.kv_gb:g}"


def plan(wanted: Wanted, folder: Path, available_cores: int) -> list[Task]:
    """All processes: etcd and Redis first, then the services, whose own start order does not matter.

    folder: private, for configuration, ready files and etcd's data.
    """
    etcd_port, redis_port, password = ports.free(), ports.free(), secrets.token_urlsafe(24)
    house = _House(wanted, folder, f"etcd://{ports.LOOPBACK}:{etcd_port}")
    index = {"DEEPINFER_KVSTORE_INDEX": f"redis://:{password}@{ports.LOOPBACK}:{redis_port}/0"}
    gateway = ("--listen", f"{ports.LOOPBACK}:{wanted.grpc_port}", "--http", f"{ports.LOOPBACK}:{wanted.http_port}")
    model = ("--model", str(wanted.model))
    worker = (*model, "--transport", wanted.transport, "--device", wanted.device)
    division = cores.divide(available_cores, wanted.prefill, wanted.decode)
    return [
        backends.etcd(folder, etcd_port),
        backends.redis(folder, redis_port, password),
        house.service("kvstore", ("--transport", wanted.transport, *wanted.disk), private=index),
        house.service("recipe", model),
        *(house.worker("prefill", i, worker, threads) for i, threads in enumerate(division.prefill)),
        *(house.worker("decode", i, worker, threads) for i, threads in enumerate(division.decode)),
        house.gateway(gateway),
    ]


@dataclass(frozen=True, slots=True)
class _House:
    """What all services of one stack share."""

    wanted: Wanted
    folder: Path
    discovery: str

    def worker(self, service: str, index: int, arguments: tuple[str, ...], threads: int) -> Task:
        task = self.service(service, (*arguments, "--threads", str(threads)), name=f"{service}-{index}")
        return replace(task, environment=cores.environment(threads))

    def gateway(self, arguments: tuple[str, ...]) -> Task:
        """Drains first: while its requests end it needs all the others."""
        task = self.service("gateway", arguments, private={_SALT: os.environ.get(_SALT) or self._salt()})
        prefills = [self._ready(f"prefill-{index}") for index in range(self.wanted.prefill)]
        decodes = [self._ready(f"decode-{index}") for index in range(self.wanted.decode)]
        reset, probe = probes.listing_gateway(self._ready("gateway"), prefills, decodes)
        return replace(task, reset=reset, probe=probe, drain_rank=0)

    def _salt(self) -> str:
        """One for the whole stack, and for later ones that find its disk: what was cached under it is hit again."""
        kept = self.wanted.kv_dir
        return secrets.token_urlsafe(24) if kept is None else keeping.salt(kept)

    def service(
        self, service: str, arguments: tuple[str, ...] = (), name: str = "", private: Mapping[str, str] | None = None
    ) -> Task:
        name = name or service
        reset, probe = probes.ready_file(self._ready(name))
        preset = ("--preset", self.wanted.preset) if self.wanted.preset else ()
        command = (sys.executable, "-m", f"services.{service}", "--discovery", self.discovery)
        return Task(
            name=name,
            service=service,
            command=(*command, "--ready-file", str(self._ready(name)), *preset, *arguments),
            reset=reset,
            probe=probe,
            environment={**cores.environment(1), **(private or {})},
            needs=("etcd", "redis"),
            drain_rank=1,
            alive=probes.still_healthy,
            hopeless=(_WRONG_SETTINGS,),
        )

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"
