"""Engine configuration: what an operator chooses, and how memory is divided. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidParameter
from engine.layout import Layout
from engine.offers import STANDARD, OfferPolicy
from engine.sampling.params import is_integer
from engine.windows import WINDOW_STATES

DTYPES = ("float32", "bfloat16")
WEIGHTS = ("dequantized", "stored")
KV_CACHES = ("rows", "records")
_POSITIVE = ("memory_bytes", "block_tokens", "max_batch_tokens", "max_sequences", "max_waiting", "anchor_every_blocks")


class TooLittleMemory(InvalidParameter):
    """The cache memory holds not even one block; `need_bytes` would."""

    def __init__(self, given_bytes: int, need_bytes: int) -> None:
        super().__init__("memory_bytes", f"{given_bytes} leaves no block", f"use at least {need_bytes}")
        self.need_bytes = need_bytes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Give `num_blocks`, or `memory_bytes` to have the blocks counted for you."""

    model_dir: Path
    dtype: str = "float32"
    num_blocks: int | None = None
    num_slots: int | None = None  # every live sequence needs one, every anchor takes one
    memory_bytes: int = 256 * 2**20  # used for whichever of the two above is not given
    block_tokens: int = 128  # raised to a multiple of every compression rate of the model
    max_batch_tokens: int = 512
    max_sequences: int = 16
    max_waiting: int = 256
    anchor_every_blocks: int = 8
    batch_invariant: bool = False
    threads: int | None = None
    kernels: str = "auto"
    weights: str = "dequantized"  # stored: FP8 and FP4 matrices stay as published, activations are cast for them
    kv_cache: str = "rows"  # records: as published, FP8 with scales, and so are handoffs and stores
    graphs: bool = True  # decode as CUDA graphs, where the kernels can be captured
    device: str = "cpu"  # cpu, cuda or cuda:N: where weights and caches are
    model_name: str = ""  # empty: the directory's name
    offers: OfferPolicy = STANDARD  # of what waits for a store
    window_state: str = "auto"  # how window rows come back at a prefix hit: see engine.windows

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_dir", Path(self.model_dir))
        for field in _POSITIVE:
            _require_positive(field, getattr(self, field))
        for field in ("num_blocks", "num_slots", "threads"):
            if getattr(self, field) is not None:
                _require_positive(field, getattr(self, field))
        if self.dtype not in DTYPES:
            raise InvalidParameter("dtype", f"{self.dtype!r} is not known", f"use one of {', '.join(DTYPES)}")
        if self.weights not in WEIGHTS:
            raise InvalidParameter("weights", f"{self.weights!r} is not known", f"use one of {', '.join(WEIGHTS)}")
        if self.kv_cache not in KV_CACHES:
            raise InvalidParameter("kv_cache", f"{self.kv_cache!r} is not known", f"use one of {', '.join(KV_CACHES)}")
        if self.window_state not in WINDOW_STATES:
            fix = f"use one of {', '.join(WINDOW_STATES)}"
            raise InvalidParameter("window_state", f"{self.window_state!r} is not known", fix)
        if self.max_batch_tokens <= self.max_sequences:
            raise InvalidParameter(
                "max_batch_tokens", "must exceed max_sequences", f"use more than {self.max_sequences}"
            )

    @property
    def keeps_stored(self) -> bool:
        """Whether weights stay as they are published."""
        return self.weights == "stored"

    @property
    def keeps_records(self) -> bool:
        """Whether what is cached is published records."""
        return self.kv_cache == "records"

    def memory(self, layout: Layout) -> tuple[int, int]:
        """Blocks and slots of this engine. Raises InvalidParameter if the memory holds not even one of each."""
        slots = self.num_slots or 2 * self.max_sequences + 16
        left = self.memory_bytes - slots * layout.window_bytes
        blocks = self.num_blocks or left // max(layout.block_bytes, 1)
        if blocks < 1:
            raise TooLittleMemory(self.memory_bytes, slots * layout.window_bytes + layout.block_bytes)
        return blocks, slots


def _require_positive(field: str, value: object) -> None:
    if not is_integer(value) or value < 1:  # type: ignore[operator]
        raise InvalidParameter(field, f"{value!r} is not a positive integer", "use an integer of at least 1")
