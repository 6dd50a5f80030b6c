"""How V4.1 is served where its makers leave a choice: cache precision and bounded replay. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.serving import flags, require_records
from engine.families.v41.config import SWITCHES, V41Config
from engine.layout import EXACT, ReplayPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """`fake_quantize`: cached records hold the values their published 8 and 4 bit formats can hold, as trained.

    The others are bounded replay, approximate, and any of them makes prefix hits recompute their last window instead of
    restoring it. `encoder_replay` asks for nothing more; a checkpoint is served so unless it says false, as its makers
    serve it. `decoder_replay`: of a prompt only the last window goes through the layers above the last entry source,
    for half the prefill parameters. `handoff_replay`: prefill computes entries alone and pushes no window; decode
    replays the last one and draws the first token.
    """

    fake_quantize: bool = False
    encoder_replay: bool = False
    decoder_replay: bool = False
    handoff_replay: bool = False

    @property
    def mark(self) -> str:
        """What the record versions of this choice end in."""
        return "q" if self.fake_quantize else "x"

    def replay(self, window: int) -> ReplayPolicy:
        """What the engine must know of it."""
        if not (self.encoder_replay or self.decoder_replay or self.handoff_replay):
            return EXACT
        return ReplayPolicy(window, self.decoder_replay, self.handoff_replay)


def parse_options(config: dict[str, Any]) -> Options:
    """The `serving` section of config.json; what it leaves out is false but for `encoder_replay`.

    Raises CheckpointError naming the key.
    """
    return Options(**flags(config, SWITCHES, on=("encoder_replay",)))


def require_widths(config: V41Config) -> None:
    """Raises CheckpointError naming the key of config.json for which there are no published records."""
    require_records({"head_dim": (config.head_dim, (512,)), "index_head_dim": (config.index_dim, (128,))})
