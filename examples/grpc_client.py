"""A gRPC client of the gateway: the models, a streamed chat, and a plain continuation with log probabilities.

Usage, from the root of the repository: .venv/bin/python examples/grpc_client.py [--address HOST:PORT] [--model nano]
The address is that of the gateway's row in the table of `deepinfer up`; `deepinfer up --grpc-port 50051` makes it the
default here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import grpc

from protos.deepinfer.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


async def chat(stub: Any, model: str, metadata: tuple[tuple[str, str], ...]) -> None:
    """Prints reasoning, then the answer, as they come."""
    request = gateway_pb2.ChatRequest(
        model=model,
        messages=[gateway_pb2.ChatMessage(role="user", content="What is 12 + 30?")],
        sampling=common_pb2.SamplingParams(max_tokens=512, temperature=0),
    )
    answering = False
    async for reply in stub.Chat(request, metadata=metadata, timeout=60):
        print(reply.reasoning, end="", flush=True)
        if reply.content:
            print("" if answering else "\nanswer: ", reply.content, sep="", end="", flush=True)
            answering = True
        if reply.HasField("finish"):
            usage = reply.finish.usage
            print(f"\n[{usage.prompt_tokens} tokens in, {usage.cached_tokens} cached, {usage.completion_tokens} out]")


async def generate(stub: Any, model: str, metadata: tuple[tuple[str, str], ...]) -> None:
    """Continues a text and prints each token's log probability."""
    request = gateway_pb2.GatewayServiceGenerateRequest(
        model=model,
        text="The quick brown",
        sampling=common_pb2.SamplingParams(max_tokens=8, temperature=0, logprobs=0),
    )
    async for reply in stub.Generate(request, metadata=metadata, timeout=60):
        logprobs = ", ".join(f"{entry.logprob:.2f}" for entry in reply.logprobs)
        print(f"{reply.text!r} [{logprobs}]")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--model", default="nano")
    asked = parser.parse_args()
    key = os.environ.get("DEEPINFER_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with grpc.aio.insecure_channel(asked.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
        listed = await stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata, timeout=10)
        print("models:", ", ".join(served.model.name for served in listed.models))
        await chat(stub, asked.model, metadata)
        await generate(stub, asked.model, metadata)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"{error.code().name}: {error.details()}") from None
