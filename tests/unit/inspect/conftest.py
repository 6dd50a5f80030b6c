"""Published configs, rebuilt from their specifications, and tiny folders of every family."""

import json
from functools import cache
from pathlib import Path

import pytest

from engine.families import tiny
from engine.inspect.report import Question, inspect

PUBLISHED = Path(__file__).parent / "published"


@cache
def _report(name):
    question = Question(PUBLISHED / f"{name}.json", (8,), (8,), (10**11,), 4)
    return question, inspect(question)


@pytest.fixture(scope="session")
def published():
    """name -> the report on a published config with tp 8, ep 8, 100 GB and 4 sequences; counted once a session."""
    return lambda name: _report(name)[1]


@pytest.fixture
def config():
    """name -> a published config to change."""
    return lambda name: json.loads((PUBLISHED / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """(family, quantized) -> a tiny checkpoint, written once a session; not to be changed."""

    @cache
    def make(family, quantized=False):
        return tiny.write(family, tmp_path_factory.mktemp("tiny") / family, 3, quantized)

    return make
