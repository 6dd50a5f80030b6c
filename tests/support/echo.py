"""A small service on the real chassis, for tests of the chassis. Payloads are raw bytes; run it with `python -m`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
from pydantic import Field, SecretStr

from fabric import deadline, errors
from fabric.discovery import MemberInfo
from fabric.health import Progress
from fabric.lifecycle import new_identity
from fabric.server import Service, run
from fabric.settings import Section, ServiceSettings

NAME = "deepinfer.test.EchoService"


class Engine(Section):
    """A nested section."""

    num_blocks: int = Field(64, gt=0, description="blocks in the pool")
    batch_invariant: bool = Field(False, description="results do not depend on the batch")


class EchoSettings(ServiceSettings, env_prefix="DEEPINFER_ECHO_"):
    """Settings of the echo service."""

    presets: ClassVar[dict[str, Any]] = {"tiny": {"max_sequences": 2, "engine": {"num_blocks": 8}}}

    max_sequences: int = Field(4, gt=0, description="sequences at a time")
    api_key: SecretStr = Field(SecretStr("hush-hush"), description="who may call")
    engine: Engine = Field(Engine(), description="engine")
    fail_build: bool = Field(False, description="fail while starting")
    loading_s: float = Field(0.0, description="seconds that a thread takes to load")
    wedged: bool = Field(False, description="hold work and make no step")


class EchoServicer:
    """Answers by what the request says; `active` counts handlers that have not cleaned up."""

    def __init__(self) -> None:
        self.active = 0

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.active += 1
        try:
            return await _answer(request)
        finally:
            self.active -= 1

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """`n,seconds`: n messages, that far apart."""
        count, _, pause = request.decode().partition(",")
        self.active += 1
        try:
            for index in range(int(count)):
                yield str(index).encode()
                await asyncio.sleep(float(pause or 0))
        finally:
            self.active -= 1

    async def watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"now"
        await asyncio.Event().wait()


async def _answer(request: bytes) -> bytes:
    command, _, argument = request.decode().partition(" ")
    match command:
        case "sleep":
            await asyncio.sleep(float(argument))
        case "fail":
            kind = getattr(errors, argument)
            raise kind("as asked", field="request", fix="ask otherwise", retry_after_s=0.25)
        case "bug":
            raise KeyError(argument)
        case "remaining":
            return str(deadline.remaining_s()).encode()
    return request


def add(servicer: EchoServicer, server: Any) -> None:
    """What protoc would generate for the three methods."""
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(servicer.stream),
        "Watch": grpc.unary_stream_rpc_method_handler(servicer.watch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class EchoStub:
    """What protoc would generate for the client."""

    def __init__(self, channel: Any) -> None:
        self.Unary = channel.unary_unary(f"/{NAME}/Unary")
        self.Stream = channel.unary_stream(f"/{NAME}/Stream")
        self.Watch = channel.unary_stream(f"/{NAME}/Watch")


@asynccontextmanager
async def build(settings: EchoSettings) -> AsyncIterator[Service]:
    if settings.fail_build:
        raise errors.StartError("told to fail", field="fail_build", fix="do not tell it to")
    if settings.loading_s:
        print(json.dumps({"event": "loading"}), flush=True)
        await asyncio.to_thread(time.sleep, settings.loading_s)
    identity = new_identity(settings.service_name(), settings.instance)
    member = MemberInfo("echo", identity.instance, "", identity.epoch)
    servicer = EchoServicer()
    progress = Progress(lambda: 1, lambda: 0, stall_s=1.5) if settings.wedged else Progress()
    yield Service(servicers=[(add, servicer)], progress=progress, members=member)
    print(json.dumps({"event": "closed", "active": servicer.active}), flush=True)


if __name__ == "__main__":
    run(EchoSettings, build)
