"""How an image stands in a prompt: markers around and between its rows of image tokens. Knows no pixels."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from engine.families.v41.vision.sizing import Plan
from engine.families.v41.vision.weights import Markers


class Role(IntEnum):
    """What a position of the span holds; all of them carry the image token's id."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


def roles(plan: Plan) -> np.ndarray:
    """int64 [plan.tokens]: start, then each row of image tokens with a newline after it, then end."""
    row = [Role.IMAGE] * plan.columns + [Role.NEWLINE]
    return np.array([Role.START, *row * plan.rows, Role.END], np.int64)


def span(embeddings: torch.Tensor, plan: Plan, markers: Markers) -> torch.Tensor:
    """fp32 [plan.tokens, embedding] from the image tokens' embeddings [rows * columns, embedding], row by row."""
    at = torch.from_numpy(roles(plan))
    rows = torch.empty(len(at), embeddings.shape[1])
    rows[at == Role.IMAGE] = embeddings
    rows[at == Role.START], rows[at == Role.NEWLINE], rows[at == Role.END] = markers.start, markers.newline, markers.end
    return rows
