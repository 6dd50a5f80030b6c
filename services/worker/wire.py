"""Between protobuf and what engine-running services hold. Knows both sides' fields and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.layout import Layout
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingParams, SamplingState
from fabric import wire
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as pb
from services.worker.receipts import Receipt
from services.worker.status import Status


class ModelLike(Protocol):
    """What an engine says of its model."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> Layout: ...


def pack_model(model: ModelLike) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        revision=model.revision,
        family=model.family,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context_tokens,
        eos_token_ids=model.eos_token_ids,
        layout=wire.pack_layout(model.layout),
    )


_SAMPLING_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "max_tokens",
    "min_tokens",
)


def unpack_sampling(message: pb.SamplingParams) -> SamplingParams:
    """The parameters with the engine's defaults where a field is absent. Ranges are the engine's to check."""
    given = {name: getattr(message, name) for name in _SAMPLING_OPTIONAL if message.HasField(name)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        **given,
    )


def pack_logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    alternatives = [pb.TokenAlternative(token_id=token, logprob=value) for token, value in logprob.top]
    return pb.TokenLogprob(
        token_id=logprob.token, logprob=logprob.logprob, rank=logprob.rank, alternatives=alternatives
    )


def unpack_logprob(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((item.token_id, item.logprob) for item in message.alternatives)
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)


def pack_logprobs(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pack_logprob(logprob) for logprob in logprobs]


def pack_receipt(receipt: Receipt) -> pb.Receipt:
    state = pb.SamplingState(seed=receipt.state.seed, emitted_tokens=receipt.state.emitted)
    first = replay = None
    if receipt.first_token is not None:
        logprob = pack_logprob(receipt.logprob) if receipt.logprob is not None else None
        first = pb.FirstToken(token_id=receipt.first_token, state=state, logprob=logprob)
    else:
        replay = pb.ReplayFrom(position=receipt.replay_from, state=state)
    return pb.Receipt(
        ticket_id=receipt.ticket_id,
        request_id=receipt.request_id,
        epoch=receipt.epoch,
        model_revision=receipt.model_revision,
        layout_fingerprint=receipt.layout_fingerprint,
        digest_kind=pb.DIGEST_KIND_XXH3_64,
        tokens=receipt.tokens,
        extents=[wire.pack_extents(receipt.extents)],
        first_token=first,
        replay_from=replay,
    )


def unpack_receipt(message: pb.Receipt) -> Receipt:
    """Raises InvalidArgument for a missing ending, and a digest kind or number of ranks that this worker cannot use."""
    ending = message.WhichOneof("ending")
    if ending is None:
        raise InvalidArgument(
            "the receipt has no ending", field="receipt.ending", fix="send prefill's receipt as it is"
        )
    if message.digest_kind != pb.DIGEST_KIND_XXH3_64:
        raise InvalidArgument(
            "only xxh3-64 digests are known here", field="receipt.digest_kind", fix="seal with xxh3-64"
        )
    if len(message.extents) != 1:
        raise InvalidArgument("one landing was granted", field="receipt.extents", fix="send one list of extents")
    first = message.first_token
    drawn = ending == "first_token"
    state = first.state if drawn else message.replay_from.state
    return Receipt(
        ticket_id=message.ticket_id,
        request_id=message.request_id,
        epoch=message.epoch,
        model_revision=message.model_revision,
        layout_fingerprint=message.layout_fingerprint,
        tokens=message.tokens,
        extents=wire.unpack_extents(message.extents[0]),
        first_token=first.token_id if drawn else None,
        state=SamplingState(state.seed, state.emitted_tokens),
        logprob=unpack_logprob(first.logprob) if first.HasField("logprob") else None,
        replay_from=None if drawn else message.replay_from.position,
    )


def pack_status(status: Status, instance: str, epoch: int) -> pb.WorkerStatus:
    engine = status.load.engine
    return pb.WorkerStatus(
        instance=instance,
        epoch=epoch,
        sequence=status.sequence,
        running_requests=engine.running,
        waiting_requests=engine.waiting + status.load.outside,
        queued_tokens=engine.queued_tokens,
        blocks_total=engine.blocks_total,
        blocks_free=engine.blocks_free + engine.blocks_cached,
        steps=engine.steps,
        draining=status.load.draining,
        keys_added=status.keys.added,
        keys_removed=status.keys.removed,
        keys_reset=status.keys.reset,
        keys_version=status.keys.version,
        keys_base=status.keys.base,
    )
