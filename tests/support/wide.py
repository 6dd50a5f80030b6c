"""Tiny V4 and V4.1 checkpoints whose caches have the widths of published records. Knows no services."""

from __future__ import annotations

import json
from pathlib import Path

from engine.families.v4 import tiny as v4
from engine.families.v41 import tiny as v41

_WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
_LAYERS = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 16, 4], "num_hash_layers": 1}


def write_wide(family: str, folder: Path, *switches: str, mtp_layers: int = 0, **changes: object) -> Path:
    """A model of `family` ("v4" or "v41") with these changes of its config, and these switches of `serving` on."""
    if family == "v4":
        given = tuple({**_WIDTHS, **_LAYERS, **changes}.items())
        v4.write_tiny(folder, v4.TinySpec(upstream=True, mtp_layers=mtp_layers, overrides=given))
    else:
        v41.write_tiny(folder, v41.TinySpec(sees=False, overrides=tuple({**_WIDTHS, **changes}.items())))
    if switches:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | {"serving": dict.fromkeys(switches, True)}
        path.write_text(json.dumps(config), encoding="utf-8")
    return folder
