"""Between protobuf and decode's own values. Knows both sides' fields and decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.layout import Layout
from engine.stops import FinishReason
from fabric import wire as fabric_wire
from fabric.deaths import Incarnation
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2 as pb
from services.decode.desk import Holding, ReserveAsk
from services.decode.generation import Batch, End, GenerateAsk
from services.decode.tickets import WriterState
from services.worker import wire
from services.worker.layouts import unpack_layout
from services.worker.pairing import Records
from services.worker.scopes import unpack_keeping, unpack_salt


def unpack_reserve(message: pb.ReserveRequest) -> ReserveAsk:
    """Raises InvalidArgument for an empty prompt or id, or a scope of no gateway; the engine checks the rest."""
    if not message.request_id:
        raise InvalidArgument("is empty", field="request_id", fix="send the request's id")
    if not message.token_ids:
        raise InvalidArgument("is empty", field="token_ids", fix="send at least one token")
    return ReserveAsk(
        request_id=message.request_id,
        tokens=tuple(message.token_ids),
        max_total_tokens=message.max_total_tokens,
        salt=unpack_salt(message.salt, message.scope),
        use_cache=message.use_cache,
        records=Records(message.model_revision, unpack_layout(message.layout, "layout")),
        writer=_unpack_incarnation(message.writer) if message.HasField("writer") else None,
        epoch=message.epoch,
        keeping=unpack_keeping(message.scope.owner, message.scope.retention, "scope"),
    )


def _unpack_incarnation(message: common.Incarnation) -> Incarnation:
    return Incarnation(message.instance, message.epoch, message.process)


def pack_ticket(holding: Holding, layout: Layout, epoch: int, lease_s: float) -> common.Ticket:
    """`layout` is decode's own."""
    return common.Ticket(
        id=holding.ticket_id,
        request_id=holding.ask.request_id,
        epoch=epoch,
        lease_ms=round(lease_s * 1000),
        landings=[fabric_wire.pack_landing(holding.landing)],
        layout=fabric_wire.pack_layout(layout),
        model_revision=holding.ask.records.model_revision,
        held_tokens=holding.reservation.held_tokens,
    )


async def generate_ask(requests: AsyncIterator[pb.DecodeServiceGenerateRequest]) -> GenerateAsk:
    """What to generate, read from the beginning of a call. All but the receipt is unpacked before the receipt comes.

    Raises:
        InvalidArgument: the call ended before its receipt, or a parameter or the receipt cannot be used.
    """
    opening = await _next(requests)
    tokens, sampling = tuple(opening.token_ids), wire.unpack_sampling(opening.sampling)
    receipt = opening.receipt if opening.HasField("receipt") else (await _next(requests)).receipt
    return GenerateAsk(
        ticket_id=opening.ticket_id,
        request_id=opening.request_id,
        tokens=tokens,
        sampling=sampling,
        receipt=wire.unpack_receipt(receipt),
        emitted_tokens=opening.emitted_tokens,
        gather_s=opening.gather_ms / 1000,
    )


async def _next(requests: AsyncIterator[pb.DecodeServiceGenerateRequest]) -> pb.DecodeServiceGenerateRequest:
    message = await anext(aiter(requests), None)
    if message is None:
        raise InvalidArgument("the call ended before its receipt", field="receipt", fix="send prefill's receipt")
    return message


_REASONS = {
    FinishReason.STOP: common.FINISH_REASON_STOP,
    FinishReason.LENGTH: common.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common.FINISH_REASON_CANCELLED,
}


def pack_output(output: Batch | End) -> pb.DecodeServiceGenerateResponse:
    if isinstance(output, End):
        finish = pb.DecodeFinish(reason=_REASONS[output.reason], stop=output.stop, completion_tokens=output.first_index)
        return pb.DecodeServiceGenerateResponse(first_index=output.first_index, finish=finish)
    return pb.DecodeServiceGenerateResponse(
        first_index=output.first_index, token_ids=output.token_ids, logprobs=wire.pack_logprobs(output.logprobs)
    )


_WRITERS: dict[pb.WriterState, WriterState] = {
    pb.WRITER_STATE_FINISHED: WriterState.FINISHED,
    pb.WRITER_STATE_NEVER_STARTED: WriterState.NEVER_STARTED,
}


def unpack_writer(state: pb.WriterState) -> WriterState:
    """What is not known to be finished may still write."""
    return _WRITERS.get(state, WriterState.UNKNOWN)
