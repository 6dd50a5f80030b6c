"""Between protobuf and prefill's own values. Knows both sides' fields and decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fabric import wire as fabric_wire
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import prefill_pb2 as pb
from services.prefill.ask import PrefillAsk, TicketGrant
from services.prefill.job import Computed, Done, Progress, Queued, Started
from services.worker import wire
from services.worker.layouts import unpack_layout
from services.worker.pairing import Records
from services.worker.scopes import unpack_keeping, unpack_salt


async def first_message(requests: AsyncIterator[pb.PrefillRequest]) -> PrefillAsk:
    """What the stream begins with. Raises InvalidArgument where that is not `start`."""
    message = await anext(aiter(requests), None)
    if message is None or message.WhichOneof("message") != "start":
        raise InvalidArgument("the stream does not begin with start", field="start", fix="send start, then attach")
    return unpack_start(message.start)


def unpack_start(message: pb.PrefillStart) -> PrefillAsk:
    """Raises InvalidArgument for a scope that no gateway makes."""
    scope = message.scope
    return PrefillAsk(
        request_id=message.request_id,
        tokens=tuple(message.token_ids),
        sampling=wire.unpack_sampling(message.sampling),
        salt=unpack_salt(message.salt, scope),
        use_cache=message.use_cache,
        emitted_tokens=message.emitted_tokens,
        keeping=unpack_keeping(scope.owner, scope.retention, "start.scope"),
    )


def unpack_ticket(message: common.Ticket) -> TicketGrant:
    """Raises InvalidArgument where the ticket is for another number of decode ranks than one."""
    if len(message.landings) != 1:
        raise InvalidArgument(
            f"{len(message.landings)} landings; this worker has one rank",
            field="ticket.landings",
            fix="pair equal ranks",
        )
    return TicketGrant(
        id=message.id,
        request_id=message.request_id,
        epoch=message.epoch,
        landing=fabric_wire.unpack_landing(message.landings[0]),
        records=Records(message.model_revision, unpack_layout(message.layout, "ticket.layout")),
        held_tokens=message.held_tokens,
        lease_s=message.lease_ms / 1000,
    )


def pack_progress(progress: Progress) -> pb.PrefillResponse:
    match progress:
        case Queued():
            return pb.PrefillResponse(queued=pb.PrefillQueued(position=progress.position))
        case Started():
            return pb.PrefillResponse(started=pb.PrefillStarted(cached_tokens=progress.cached_tokens))
        case Computed():
            chunk = pb.PrefillChunk(computed_tokens=progress.computed_tokens, pushed_tokens=progress.pushed_tokens)
            return pb.PrefillResponse(chunk=chunk)
        case Done():
            return pb.PrefillResponse(done=_pack_done(progress))


def _pack_done(done: Done) -> pb.PrefillDone:
    return pb.PrefillDone(
        receipt=wire.pack_receipt(done.receipt),
        usage=common.Usage(
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            completion_tokens=done.receipt.state.emitted,
        ),
        prompt_logprobs=wire.pack_logprobs(done.prompt_logprobs),
    )
