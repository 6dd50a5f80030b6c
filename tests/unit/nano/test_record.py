"""The committed record of training: whole, and drawn into the committed picture."""

from __future__ import annotations

import json

from models.nano.data.mixture import classes
from models.nano.picture import RECORD, draw

CURVE = json.loads((RECORD / "curve.json").read_text())


def test_picture_is_drawn_from_the_curve() -> None:
    assert (RECORD / "curve.svg").read_text() == draw(CURVE)


def test_curve_covers_the_whole_schedule_and_every_class() -> None:
    steps = [point["step"] for point in CURVE["points"]]
    assert steps == sorted(steps)
    assert steps[-1] == CURVE["exams"][-1]["step"] == 8600
    assert {each.kind for each in classes(len)} < set(CURVE["exams"][-1])


def test_recall_fails_without_the_trained_indexer() -> None:
    figures = json.loads((RECORD / "ablation.json").read_text())["exact_match"]
    assert figures["trained indexer"]["recall"] >= 0.95
    assert max(figures[choice]["recall"] for choice in ("most recent entries", "random entries")) < 0.6
