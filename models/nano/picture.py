"""Draws the loss curve and the accuracies of `record/curve.json` as an SVG: `python -m models.nano.picture`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from models.nano.config import HERE
from models.nano.schedule import QUANTIZED_FROM, SPARSE_FROM

RECORD = HERE / "record"
WIDTH, HEIGHT, LEFT, TOP, GAP = 860, 250, 60, 30, 60
HUES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    """Exponential mean, started at the first value."""
    smoothed, level = [], values[0]
    for value in values:
        level = keep * level + (1 - keep) * value
        smoothed.append(level)
    return smoothed


class Panel:
    """One set of axes: steps 0..last across, `low`..`high` up."""

    def __init__(self, top: int, last: int, low: float, high: float, title: str) -> None:
        self.top, self.last, self.low, self.high = top, last, low, high
        self.parts = [
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
            f'<text x="{LEFT}" y="{top - 8}">{title}</text>',
        ]
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            value = low + share * (high - low)
            self.parts.append(f'<text x="{LEFT - 8}" y="{self.y(value) + 4:.0f}" text-anchor="end">{value:g}</text>')

    def x(self, step: float) -> float:
        return LEFT + WIDTH * step / self.last

    def y(self, value: float) -> float:
        bounded = min(max(value, self.low), self.high)
        return self.top + HEIGHT * (1 - (bounded - self.low) / (self.high - self.low))

    def line(self, steps: Sequence[float], values: Sequence[float], hue: str, label: str, place: int) -> None:
        points = " ".join(f"{self.x(s):.1f},{self.y(v):.1f}" for s, v in zip(steps, values, strict=True))
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.5"/>')
        self.parts.append(f'<text x="{LEFT + WIDTH + 10}" y="{self.top + 14 + 18 * place}" fill="{hue}">{label}</text>')

    def mark(self, step: float, label: str) -> None:
        x = self.x(step)
        self.parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{self.top}" y2="{self.top + HEIGHT}" stroke="#bbb"/>')
        self.parts.append(f'<text x="{x + 4:.0f}" y="{self.top + 14}" fill="#777">{label}</text>')


def draw(curve: dict[str, Any]) -> str:
    """The whole picture as SVG text."""
    points, exams = curve["points"], curve["exams"]
    last = points[-1]["step"]
    steps = [point["step"] for point in points]
    losses = Panel(TOP, last, 0.0, 2.0, "training loss per answer-weighted token (smoothed, cut at 2), index loss")
    losses.line(steps, smooth([point["loss"] for point in points]), HUES[0], "tokens", 0)
    losses.line(steps, smooth([point["index_loss"] for point in points]), HUES[1], "index (KL)", 1)
    kinds = [key for key in exams[-1] if key not in ("step", "sparse")]
    shares = Panel(TOP + HEIGHT + GAP, last, 0.0, 1.0, "exact match on held-out problems while training")
    for place, kind in enumerate(kinds):
        shares.line([e["step"] for e in exams], [e[kind] for e in exams], HUES[place % len(HUES)], kind, place)
    for panel in (losses, shares):
        panel.mark(SPARSE_FROM * last, "sparse attention")
        panel.mark(QUANTIZED_FROM * last, "FP8 and FP4 values")
    body = "\n".join(losses.parts + shares.parts)
    size = f'width="{LEFT + WIDTH + 120}" height="{TOP + 2 * HEIGHT + GAP + 20}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect {size} fill="white"/>\n{body}\n</svg>\n'


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m models.nano.picture", description=__doc__).parse_args()
    (RECORD / "curve.svg").write_text(draw(json.loads((RECORD / "curve.json").read_text())))
