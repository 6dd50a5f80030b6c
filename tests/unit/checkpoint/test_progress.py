"""A load tells how far it is, and draws a bar only where somebody watches."""

from __future__ import annotations

import io

from rich.console import Console

from engine.checkpoint.progress import Loaded, Meter, load_bar


def test_a_meter_counts_tensors_and_bytes() -> None:
    seen: list[Loaded] = []
    meter = Meter(2, 30, seen.append)
    meter.add(10)
    meter.add(20)
    assert seen == [Loaded(1, 2, 10, 30), Loaded(2, 2, 30, 30)]


def test_a_terminal_sees_bytes_and_tensors() -> None:
    screen = io.StringIO()
    with load_bar("nano", Console(file=screen, force_terminal=True, width=120)) as progress:
        assert progress is not None
        progress(Loaded(1234, 5678, 10_000_000, 40_000_000))
    assert "loading nano" in screen.getvalue()
    assert "1,234/5,678 tensors" in screen.getvalue()
    assert "10.0/40.0 MB" in screen.getvalue()


def test_without_a_terminal_nothing_is_written() -> None:
    pipe = io.StringIO()
    with load_bar("nano", Console(file=pipe)) as progress:
        assert progress is None
    assert pipe.getvalue() == ""
