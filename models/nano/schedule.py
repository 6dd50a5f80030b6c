"""What a training step does, as a function of how far training is: rate, recall distance, sparse, quantized. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from models.nano.data.recall import MAX_DISTANCE

WARMUP_STEPS = 200
SHORTEST_DISTANCE = 400
NEAR_UNTIL, FAR_FROM = 0.06, 0.20
SPARSE_FROM = 0.35
QUANTIZED_FROM = 0.50
COOLDOWN_FROM = 0.62
LOWEST_RATE = 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    """`factor` of the learning rates, `distance` of recall problems, `sparse`: attend only the indexer's choice,
    `quantize`: the model holds FP8 and FP4 values."""

    factor: float
    distance: int
    sparse: bool
    quantize: bool


def phase_at(step: int, total: int) -> Phase:
    """Phase of a step: warm-up, constant rate, linear cool-down; near recall first; dense, then sparse attention."""
    done = step / total
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    cool = 1.0 if done < COOLDOWN_FROM else max((1 - done) / (1 - COOLDOWN_FROM), LOWEST_RATE)
    reach = min(max((done - NEAR_UNTIL) / (FAR_FROM - NEAR_UNTIL), 0.0), 1.0)
    distance = int(SHORTEST_DISTANCE + reach * (MAX_DISTANCE - SHORTEST_DISTANCE))
    return Phase(min(warm, cool), distance, done >= SPARSE_FROM, done >= QUANTIZED_FROM)
