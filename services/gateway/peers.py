"""The services that one request needs, as the flow calls them. Knows methods; opens, retries and chooses nothing."""

from __future__ import annotations

from typing import Any, Protocol

from protos.deepinfer.v1 import decode_pb2, prefill_pb2, recipe_pb2
from services.gateway import rpc
from services.gateway.rpc import Stream

ParseStream = Stream[recipe_pb2.ParseRequest, recipe_pb2.ParseResponse]
PrefillStream = Stream[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
TokenStream = Stream[decode_pb2.DecodeServiceGenerateRequest, decode_pb2.DecodeServiceGenerateResponse]


class Recipe(Protocol):
    """Translates between a protocol and tokens."""

    @property
    def key(self) -> str:
        """Names this incarnation."""
        ...

    async def render(self, request: recipe_pb2.RenderRequest, request_id: str) -> recipe_pb2.RenderResponse: ...

    def parse(self, request_id: str) -> ParseStream: ...


class Prefill(Protocol):
    """Computes prompts."""

    def prefill(self, request_id: str) -> PrefillStream: ...

    async def prefetch(
        self, request: prefill_pb2.PrefillServicePrefetchRequest, request_id: str
    ) -> prefill_pb2.PrefillServicePrefetchResponse: ...


class Decode(Protocol):
    """Generates tokens."""

    async def reserve(self, request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse: ...

    def generate(self, request_id: str) -> TokenStream: ...

    async def release(self, request: decode_pb2.ReleaseRequest, request_id: str, timeout_s: float) -> None: ...


class GrpcRecipe:
    """A recipe service behind its stub."""

    def __init__(self, key: str, stub: Any) -> None:
        self.key, self._stub = key, stub

    async def render(self, request: recipe_pb2.RenderRequest, request_id: str) -> recipe_pb2.RenderResponse:
        reply: recipe_pb2.RenderResponse = await rpc.unary(self._stub.Render, request, request_id)
        return reply

    def parse(self, request_id: str) -> ParseStream:
        return rpc.duplex(self._stub.Parse, request_id)


class GrpcPrefill:
    """A prefill worker behind its stub."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def prefill(self, request_id: str) -> PrefillStream:
        return rpc.duplex(self._stub.Prefill, request_id)

    async def prefetch(
        self, request: prefill_pb2.PrefillServicePrefetchRequest, request_id: str
    ) -> prefill_pb2.PrefillServicePrefetchResponse:
        reply: prefill_pb2.PrefillServicePrefetchResponse = await rpc.unary(self._stub.Prefetch, request, request_id)
        return reply


class GrpcDecode:
    """A decode worker behind its stub."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def reserve(self, request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse:
        reply: decode_pb2.ReserveResponse = await rpc.unary(self._stub.Reserve, request, request.request_id)
        return reply

    def generate(self, request_id: str) -> TokenStream:
        return rpc.duplex(self._stub.Generate, request_id)

    async def release(self, request: decode_pb2.ReleaseRequest, request_id: str, timeout_s: float) -> None:
        await rpc.unary(self._stub.Release, request, request_id, timeout_s)
