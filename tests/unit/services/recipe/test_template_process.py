"""The process of a template: it comes back after whatever ended it, and goes with its owner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fabric.errors import StartError, Unavailable
from services.recipe.template_process import TemplateProcess

WHERE = Path("chat_template.jinja")


def asking(**variables: Any) -> dict[str, Any]:
    return {"variables": variables, "max_chars": 100, "now": 86_400.0}


def renderers() -> list[psutil.Process]:
    """Children of this process that render templates; other tests' children may end while they are looked at."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("template_child" in arg for arg in each.cmdline()):
                found.append(each)
    return found


def child() -> psutil.Process:
    [found] = renderers()
    return found


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess("{{ said }}|{{ strftime_now('%Y-%m-%d') }}", WHERE, 10.0)
    yield made
    made.close()


def test_it_renders_with_the_time_it_is_told(process: TemplateProcess) -> None:
    assert process.ask(asking(said="on")) == {"text": "on|1970-01-02"}


def test_it_is_started_again_after_it_was_killed(process: TemplateProcess) -> None:
    killed = child()
    killed.kill()
    killed.wait(10)
    with pytest.raises(Unavailable):
        process.ask(asking(said="on"))
    assert process.ask(asking(said="on")) == {"text": "on|1970-01-02"}


def test_it_has_no_environment_and_its_memory_is_bounded(process: TemplateProcess) -> None:
    assert child().environ() == {}
    soft, hard = child().rlimit(psutil.RLIMIT_AS)
    assert soft == hard == 1 << 30


def test_it_ends_with_its_owner(process: TemplateProcess) -> None:
    running = child()
    process.close()
    assert not running.is_running()
    process.close()


def test_what_does_not_compile_leaves_no_process_behind() -> None:
    with pytest.raises(StartError, match=r"chat_template\.jinja"):
        TemplateProcess("{% if %}", WHERE, 10.0)
    assert not renderers()
