"""Sampling parameters on their way to the workers. Knows the engine's own value and its protobuf form."""

from __future__ import annotations

from dataclasses import fields, replace

from engine.errors import InvalidParameter
from engine.sampling.params import SamplingParams
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2

_REPEATED = frozenset({"stop", "stop_token_ids"})
_SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name not in _REPEATED)


def checked(params: SamplingParams, vocab_size: int, field: str = "") -> SamplingParams:
    """`params`, which a vocabulary of `vocab_size` can serve.

    Raises:
        InvalidArgument: naming the parameter, below `field` where the request nests them.
    """
    try:
        params.validate(vocab_size)
    except InvalidParameter as error:
        raise InvalidArgument(error.message, field=nested(error.field, field), fix=error.fix) from error
    return params


def nested(name: str, field: str) -> str:
    """How a client calls a parameter that its request nests in `field`; empty: in nothing."""
    return f"{field}.{name}" if field else name


def pack(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every value spelled out, so that both workers sample alike whatever their defaults."""
    message = common_pb2.SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids)
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    return message


def unpack(message: common_pb2.SamplingParams, default_max_tokens: int) -> SamplingParams:
    """The parameters of a gRPC client; absent ones take the engine's defaults. Ranges are for `checked`."""
    given = {name: getattr(message, name) for name in _SCALARS if name != "ignore_eos" and message.HasField(name)}
    params = SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        **given,
    )
    return params if "max_tokens" in given else replace(params, max_tokens=default_max_tokens)
