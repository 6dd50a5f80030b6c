"""Marks: how far one prompt is computed, as its pusher sees it. Knows counts; knows no engine and no link."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """`tokens` are final unless `generation` changes: then the prompt lost its blocks and is computed anew.

    Once `complete`, `windows` says whether the window groups are handed over too, or replayed by decode.
    """

    generation: int = 0
    tokens: int = 0
    complete: bool = False
    windows: bool = True


class Marks:
    """The newest mark; older ones are of no interest."""

    def __init__(self) -> None:
        self.now = Mark()
        self._changed = asyncio.Event()

    def computed(self, tokens: int) -> None:
        self._set(Mark(self.now.generation, tokens))

    def completed(self, windows: bool = True) -> None:
        """The whole prompt is computed and its KV is held."""
        self._set(Mark(self.now.generation, self.now.tokens, complete=True, windows=windows))

    def lost(self) -> None:
        """What was computed is void."""
        self._set(Mark(self.now.generation + 1))

    async def after(self, seen: Mark, timeout_s: float) -> Mark | None:
        """The newest mark once it differs from `seen`; None if it does not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.now == seen:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.now

    def _set(self, mark: Mark) -> None:
        self.now = mark
        self._changed.set()
