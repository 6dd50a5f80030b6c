"""One tiny model for all worker tests, and its truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.families.v4.tiny import TinySpec, write_tiny
from tests.support.oracle import Oracle


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, TinySpec())
    return folder


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
