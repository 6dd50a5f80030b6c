"""A codec over the byte-level model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.recipe.codec import Codec
from services.recipe.model_files import ModelFiles
from tests.support import bytemodel


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder: Path = bytemodel.write(tmp_path_factory.mktemp("model") / "bytes")
    return Codec("bytes", ModelFiles.read(folder), "v4.1")
