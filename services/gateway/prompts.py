"""What a prompt may be: lengths, token ids, and which token ends the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2
from services.gateway.job import Job, ModelLimits, Prompt
from services.gateway.sampling import checked, nested


def refuse_early(job: Job, limits: ModelLimits) -> None:
    """Raises InvalidArgument for what cannot fit however short the prompt is."""
    if job.max_tokens is not None and job.max_tokens >= limits.max_total_tokens:
        raise _too_many(job, job.max_tokens, limits.max_total_tokens - 1)


def bounded(
    job: Job,
    limits: ModelLimits,
    token_ids: Sequence[int],
    parsing_options: bytes,
    default_max_tokens: int,
    seed: int,
) -> Prompt:
    """The prompt with its sampling decided: `seed` where the client gave none, room for the output it may have.

    Raises:
        InvalidArgument: empty, too long, ids outside the vocabulary, or sampling that the model cannot serve.
    """
    count = len(token_ids)
    room = limits.max_total_tokens - count
    if not count:
        raise InvalidArgument("the prompt is empty", field=job.prompt_field, fix="send at least one token")
    if count > limits.max_prompt_tokens or room < 1:
        most = min(limits.max_prompt_tokens, limits.max_total_tokens - 1)
        raise InvalidArgument(
            f"the prompt has {count} tokens, at most {most} fit", field=job.prompt_field, fix="shorten the prompt"
        )
    if max(token_ids) >= limits.vocab_size:
        raise InvalidArgument(
            f"a token id is outside the vocabulary of {limits.vocab_size}", field=job.prompt_field, fix="check the ids"
        )
    if job.max_tokens is not None and job.max_tokens > room:
        raise _too_many(job, job.max_tokens, room)
    sampling = replace(
        job.sampling,
        max_tokens=job.max_tokens or max(1, min(default_max_tokens, room)),
        seed=seed if job.sampling.seed is None else job.sampling.seed,
    )
    checked(sampling, limits.vocab_size, job.sampling_field)
    return Prompt(token_ids, parsing_options, sampling, limits.eos_token_ids)


def finish_of(prompt: Prompt, token: int, count: int) -> common_pb2.FinishReason | None:
    """Why token number `count` is the last, or None. Stop strings are decode's to find: they need text."""
    sampling = prompt.sampling
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else prompt.eos_token_ids)
    if sampling.min_tokens <= count and token in ends:
        return common_pb2.FINISH_REASON_STOP
    if sampling.max_tokens == count and not sampling.stop:
        return common_pb2.FINISH_REASON_LENGTH
    return None


def _too_many(job: Job, asked: int, most: int) -> InvalidArgument:
    return InvalidArgument(
        f"{asked} output tokens were asked for, at most {most} fit",
        field=job.named(nested("max_tokens", job.sampling_field)),
        fix=f"ask for at most {most}",
    )
