"""One accepted request on its way through the services. Knows values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prefix import RegionSalt, Salt
from engine.sampling.params import SamplingParams
from fabric import wire
from fabric.retention import UNOWNED, Keeping
from protos.deepinfer.v1 import common_pb2, recipe_pb2
from services.gateway.openings import Shared
from services.gateway.regions import Region
from services.gateway.tap import Batch


@dataclass(frozen=True, slots=True)
class Job:
    """What a surface accepted.

    Either `render` (a chat body or a text) or `token_ids` is the prompt. `max_tokens` None leaves it to the model's
    encoding; `sampling.max_tokens` then means nothing. `prompt_field` is what errors about the prompt name, and
    `sampling_field` what the surface nests sampling parameters in, if anything; `named` tells what it calls a field of
    what is rendered. `salt`, the owner in `keeping` and
    `regions` are the tenant's: no client names them.
    """

    request_id: str
    model: str
    salt: bytes
    dialect: recipe_pb2.Dialect
    sampling: SamplingParams
    max_tokens: int | None
    prompt_field: str
    render: recipe_pb2.RenderRequest | None = None
    token_ids: tuple[int, ...] = ()
    use_cache: bool = True
    stream: bool = True
    include_usage: bool = False
    created: int = 0
    sampling_field: str = ""
    keeping: Keeping = UNOWNED
    regions: tuple[Region, ...] = ()
    named: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the present workers of one model take."""

    max_prompt_tokens: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A job's prompt in tokens, with sampling fully decided."""

    token_ids: Sequence[int]
    parsing_options: bytes
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    shared: Shared | None = None  # where the prompt starts with a region of its tenant

    @property
    def max_total_tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens

    def scope(self, job: Job) -> common_pb2.CacheScope:
        """Whose the prompt's blocks are and how long they are kept, as workers are told."""
        keeping, shared = job.keeping, self.shared
        scope = common_pb2.CacheScope(owner=keeping.owner, retention=wire.pack_retention(keeping.retention))
        if shared is not None:
            scope.region_tokens, scope.region_salt = shared.tokens, shared.salt
        return scope

    def salt(self, job: Job) -> Salt:
        """What the prompt's block keys are made with."""
        return job.salt if self.shared is None else RegionSalt(job.salt, self.shared.salt, self.shared.tokens)


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended."""

    reason: common_pb2.FinishReason
    stop: str
    usage: common_pb2.Usage


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a hint found: tokens of the prompt, of these kept in a cache, and of these on their way to memory."""

    prompt_tokens: int
    held_tokens: int
    rising_tokens: int


@dataclass(frozen=True, slots=True)
class Update:
    """One step of an answer: tokens, what they say, and on the last one how it ended."""

    batch: Batch
    events: Sequence[recipe_pb2.ParseEvent]
    prompt_logprobs: Sequence[common_pb2.TokenLogprob] = ()
    finish: Finish | None = None
