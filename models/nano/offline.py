"""The exported checkpoint in the training modules, float32, without the serving stack."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.nano.attention import attend_chunked
from models.nano.config import load_config
from models.nano.export import read
from models.nano.model import Nano, Rows


class Offline:
    """Loads a checkpoint folder onto the GPU where there is one."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Nano(load_config(), attend_chunked)
        self.model.load_state_dict(read(folder))
        self.model.to(self.device)

    @torch.inference_mode()
    def predict(self, rows: Rows) -> Tensor:
        """Argmax token after each position [rows, tokens]."""
        hidden, _, _ = self.model(Rows(rows.ids, rows.documents, None, rows.dense))
        return torch.cat([self.model.head(row).argmax(-1)[None] for row in hidden])
