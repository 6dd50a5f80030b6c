"""Garbage: keeps Python's collector of cycles from stopping requests. Knows the collector alone."""

from __future__ import annotations

import gc

# New objects between two looks at the youngest; the default of 700 is reached several times in every request.
_YOUNGEST = 5_000


def spare_what_stays() -> None:
    """Collects once, then takes all that lives now out of every later collection: to be called when a service is ready.

    What a service loaded (modules, schemas, a model) stays to its end, and a full collection went through all of it:
    50 to 185 ms in a worker, during which nothing is computed or sent. Cycles made from now on are collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, *gc.get_threshold()[1:])
