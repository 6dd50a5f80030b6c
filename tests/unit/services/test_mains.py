"""`python -m services.NAME`: what starts a service, and what must not."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import services
from fabric import server

MAINS = [path.parent.name for path in Path(services.__file__).parent.glob("*/__main__.py")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings of services that would have been started."""
    found: list[Any] = []
    monkeypatch.setattr(server, "run", lambda settings, build, check: found.append(settings.__name__))
    return found


def test_every_service_has_a_command() -> None:
    assert sorted(MAINS) == ["decode", "gateway", "kvstore", "prefill", "recipe"]


@pytest.mark.parametrize("name", MAINS)
def test_a_command_starts_its_service_and_an_import_of_it_starts_nothing(
    name: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"services.{name}.__main__"
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.import_module(module)
    assert started == []
    monkeypatch.delitem(sys.modules, module)
    runpy.run_module(f"services.{name}", run_name="__main__")
    assert [settings.lower() for settings in started] == [f"{name}settings"]
