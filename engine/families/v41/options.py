"""How V4.1 is served where its makers leave a choice: cache precision and bounded replay. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.v41.fields import Fields, refusal

SECTION = "serving"


@dataclass(frozen=True, slots=True)
class Options:
    """`fake_quantize`: cached records hold the values their published 8 and 4 bit formats can hold, as trained.

    `decoder_replay`: of each prefill chunk only the last window goes through the layers above the last entry source;
    approximate, for half the prefill parameters. Both change what is cached, and with it the layout's fingerprint.
    """

    fake_quantize: bool = False
    decoder_replay: bool = False

    @property
    def mark(self) -> str:
        """What the record versions of this choice end in."""
        return ("q" if self.fake_quantize else "") + ("r" if self.decoder_replay else "") or "x"


def parse_options(config: dict[str, Any]) -> Options:
    """The `serving` section of config.json, all false where it is absent. Raises CheckpointError naming the key."""
    section = config.get(SECTION, {})
    if not isinstance(section, dict):
        raise refusal(SECTION, f"{section!r} is not a section")
    known = Options.__dataclass_fields__
    if unknown := set(section) - set(known):
        raise refusal(SECTION, f"{sorted(unknown)} unknown", f"use {', '.join(known)}")
    return Options(**{key: Fields(section).flag(key) for key in known})
