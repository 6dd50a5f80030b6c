"""One tiny model with a byte tokenizer for all tests of the whole stack, and its truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.oracle import Oracle
from tests.support.wholestack import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bytes") / "tiny")


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
