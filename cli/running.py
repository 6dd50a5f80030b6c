"""Checks of services that run: what carries their KV, and the recipe's dialect. Asks each for its Info, no more."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import grpc

from cli import runtime
from cli.console import silent_logs
from cli.doctor import Check, Finding, Health
from cli.runtime import StackRecord
from fabric.discovery import open_discovery
from fabric.errors import StartError, Unavailable
from fabric.kvlink.lanes import Expectation, kinds
from protos.deepinfer.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    recipe_pb2,
    recipe_pb2_grpc,
)

_ANSWER_S = 2.0
_DISCOVERY_S = 5.0
# Until something was pushed nobody has chosen a lane.
_TRANSPORTS = ("ucx", "tcp", "inproc")
_NO_LANE = ("", "unconnected")


@dataclass(frozen=True, slots=True)
class Running:
    """One service that runs. transport: what it was told to move KV with; empty where that is not known."""

    name: str
    service: str
    address: str
    transport: str = ""


def here() -> list[Running]:
    """The services of this user's stacks on this machine."""
    return of_stacks(runtime.stacks(runtime.folder()))


def of_stacks(stacks: Iterable[StackRecord]) -> list[Running]:
    """The services of these stacks that can be asked."""
    several = len(stacks := list(stacks)) > 1
    return [
        Running(f"{name} of {stack.pid}" if several else name, name.partition("-")[0], address, stack.transport)
        for stack in stacks
        for name, address in stack.addresses.items()
        if name.partition("-")[0] in _SERVICES
    ]


def of_discovery(url: str, transport: str) -> list[Running]:
    """The services that discovery names, all of which should move KV with `transport`.

    Raises StartError for a wrong URL, Unavailable where discovery does not answer; both name the option.
    """
    try:
        _require_transport(transport)
        with silent_logs():
            return asyncio.run(_members(url, transport))
    except (StartError, Unavailable) as error:
        raise type(error)(error.message, field=f"--{error.field.removeprefix('--')}", fix=error.fix) from error


def checks(running: Iterable[Running]) -> dict[str, Check]:
    """One check for each, by its name."""
    return {one.name: partial(_SERVICES[one.service], one) for one in running}


def _worker(make: Callable[[Any], Any], ask: Callable[[], Any], one: Running) -> Finding:
    try:
        lane = _info(make, ask, one).transport_lane
    except grpc.RpcError as error:
        return _silent(one, error)
    return judge(lane, one.transport)


def judge(lane: str, transport: str) -> Finding:
    """Compares the `lane` that a worker reports with the one that its transport's URL says must be there."""
    expected = _expected(transport)
    wish = f", {expected.kind} is expected" if expected.kind else ""
    if lane in _NO_LANE:
        return Finding(Health.OK, f"no KV has moved yet{wish}")
    found = kinds(lane)
    kind = found[0] if found else "of no known kind"
    if expected.kind is None or expected.kind in found:
        return Finding(Health.OK, f"KV moves over {kind} ({lane}){wish}")
    health = Health.FAIL if expected.missing == "error" else Health.WARN
    fix = "check UCX_TLS, UCX_NET_DEVICES and the device's driver, or start it with another transport"
    return Finding(health, f"KV moves over {kind} ({lane}){wish}", fix)


def _recipe(one: Running) -> Finding:
    try:
        info = _info(recipe_pb2_grpc.RecipeServiceStub, recipe_pb2.RecipeServiceInfoRequest, one)
    except grpc.RpcError as error:
        return _silent(one, error)
    chats = recipe_pb2.DIALECT_OPENAI_CHAT in info.dialects
    if not chats:
        fix = "for chats add the model's chat_template.jinja to its folder"
        return Finding(Health.WARN, f"dialect {info.encoding}: {info.model} generates, but does not chat", fix)
    return Finding(Health.OK, f"dialect {info.encoding} for {info.model}")


_SERVICES: dict[str, Callable[[Running], Finding]] = {
    "prefill": partial(_worker, prefill_pb2_grpc.PrefillServiceStub, prefill_pb2.PrefillServiceInfoRequest),
    "decode": partial(_worker, decode_pb2_grpc.DecodeServiceStub, decode_pb2.DecodeServiceInfoRequest),
    "kvstore": partial(_worker, kvstore_pb2_grpc.KvStoreServiceStub, kvstore_pb2.KvStoreServiceInfoRequest),
    "recipe": _recipe,
}


def _require_transport(url: str) -> None:
    """Raises StartError for what no service could move KV with. An empty one stands for none that is expected."""
    if url and urlsplit(url).scheme not in _TRANSPORTS:
        fix = "use ucx://, such as ucx://?expect=rdma, or tcp://host:port"
        raise StartError(f"no KV transport for {url!r}", field="transport", fix=fix)
    _expected(url)


def _expected(transport: str) -> Expectation:
    return Expectation.parse(dict(parse_qsl(urlsplit(transport).query)))


def _info(make: Callable[[Any], Any], ask: Callable[[], Any], one: Running) -> Any:
    with grpc.insecure_channel(one.address) as channel:
        return make(channel).Info(ask(), timeout=_ANSWER_S)


def _silent(one: Running, error: Any) -> Finding:
    return Finding(Health.FAIL, f"{one.address} does not answer: {error.code().name}", "see its log; restart it")


async def _members(url: str, transport: str) -> list[Running]:
    discovery = open_discovery(url)
    await discovery.ready(_DISCOVERY_S)
    found: list[Running] = []
    for service in _SERVICES:
        members: Any = discovery.members(service)
        async with aclosing(members):
            try:
                async with asyncio.timeout(_DISCOVERY_S):
                    snapshot = await anext(members)
            except TimeoutError as error:
                raise Unavailable(f"{url} does not tell who runs", field="--discovery", fix="is it up?") from error
        found += [Running(member.instance, service, member.address, transport) for member in snapshot]
    return found
