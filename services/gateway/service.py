"""The gateway's gRPC face: identify, translate, pack. Knows messages; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc, recipe_pb2
from services.gateway import intake
from services.gateway.front import Front
from services.gateway.job import Finish, Update
from services.gateway.pool import Pool
from services.gateway.tenants import Tenant

Context = Any  # grpc.aio.ServicerContext


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Generate, Chat, Prefetch, ListModels."""

    def __init__(self, front: Front, pool: Pool) -> None:
        self._front, self._pool = front, pool

    async def Generate(
        self, request: gateway_pb2.GatewayServiceGenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GatewayServiceGenerateResponse]:
        tenant = self._tenant(context)
        job = intake.generate_from_message(request, self._front.stamp(tenant, "gen-"))
        async with self._front.answer(tenant, job, "grpc_generate") as updates:
            async for update in updates:
                yield _generated(job.request_id, update)

    async def Chat(self, request: gateway_pb2.ChatRequest, context: Context) -> AsyncIterator[gateway_pb2.ChatResponse]:
        tenant = self._tenant(context)
        job = intake.chat_from_message(request, self._front.stamp(tenant, "chat-"))
        async with self._front.answer(tenant, job, "grpc_chat") as updates:
            async for update in updates:
                yield _said(job.request_id, update)

    async def Prefetch(
        self, request: gateway_pb2.GatewayServicePrefetchRequest, context: Context
    ) -> gateway_pb2.GatewayServicePrefetchResponse:
        tenant = self._tenant(context)
        job = intake.prefetch_from_message(request, self._front.stamp(tenant, "pre-"))
        found = await self._front.prefetch(tenant, job, "grpc_prefetch")
        return gateway_pb2.GatewayServicePrefetchResponse(
            request_id=job.request_id,
            prompt_tokens=found.prompt_tokens,
            held_tokens=found.held_tokens,
            rising_tokens=found.rising_tokens,
        )

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> Any:
        self._tenant(context)
        return gateway_pb2.ListModelsResponse(models=self._pool.models())

    def _tenant(self, context: Context) -> Tenant:
        return self._front.tenants.identify(dict(context.invocation_metadata() or ()).get("authorization", ""))


def _generated(request_id: str, update: Update) -> gateway_pb2.GatewayServiceGenerateResponse:
    return gateway_pb2.GatewayServiceGenerateResponse(
        request_id=request_id,
        first_index=update.batch.first_index,
        token_ids=update.batch.token_ids,
        text="".join(event.content for event in update.events),
        logprobs=update.batch.logprobs,
        prompt_logprobs=update.prompt_logprobs,
        finish=_finish(update.finish),
    )


def _said(request_id: str, update: Update) -> gateway_pb2.ChatResponse:
    calls = [event.tool_call for event in update.events if event.WhichOneof("event") == "tool_call"]
    return gateway_pb2.ChatResponse(
        request_id=request_id,
        reasoning="".join(event.reasoning for event in update.events),
        content="".join(event.content for event in update.events),
        tool_calls=[_part(call) for call in calls],
        logprobs=update.batch.logprobs,
        finish=_finish(update.finish),
    )


def _part(call: recipe_pb2.ToolCallDelta) -> gateway_pb2.ToolCallPart:
    return gateway_pb2.ToolCallPart(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def _finish(finish: Finish | None) -> gateway_pb2.Finish | None:
    return None if finish is None else gateway_pb2.Finish(reason=finish.reason, stop=finish.stop, usage=finish.usage)
