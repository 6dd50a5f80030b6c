"""A family is known to its own package and to the registry: no other module of the engine or a service names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.families.registry import packages
from engine.families.tiny import WRITERS

ROOT = Path(__file__).resolve().parents[3]
SEARCHED = ("cli", "engine", "fabric", "kernels", "services")
SHORT = {*WRITERS, *(package.rsplit(".", 1)[1] for package in packages())}
LONG = re.compile(r"deepseek_v\d|Deepseek\w*ForCausalLM")
ENCODINGS = {"services/recipe/codec.py", "services/recipe/settings.py"}  # prompt formats, some of the same names


def named(source: str) -> Iterator[tuple[int, str]]:
    """Lines of `source` that name a family in code: an import of its package, or its name as a value."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if any(f"{module}.".startswith(f"{package}.") for module in modules for package in packages()):
            yield node.lineno, modules[0]
        text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else None
        if isinstance(text, str) and (text in SHORT or LONG.search(text)):
            yield node.lineno, text


def outside() -> Iterator[Path]:
    for package in SEARCHED:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.is_relative_to(ROOT / "engine/families"):
                yield path


def test_nothing_outside_the_families_names_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in outside()
        if str(path.relative_to(ROOT)) not in ENCODINGS
        for line, name in named(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask the family instead (engine/families/facts.py): " + "; ".join(found)


def test_the_shared_modules_of_the_families_name_none_but_the_registry() -> None:
    shared = sorted((ROOT / "engine/families").glob("*.py"))
    naming = {path.name for path in shared if list(named(path.read_text(encoding="utf-8")))}
    assert naming == {"registry.py"}


@pytest.mark.parametrize(
    "source",
    [
        "from engine.families.v4 import config",
        "from engine.families import mla",
        "import engine.families.v41.records",
        'if model.family == "deepseek_v4": pass',
        'kinds = {"v41": 1}',
        'name = f"{x}DeepseekV4ForCausalLM"',
    ],
)
def test_a_named_family_is_seen(source: str) -> None:
    assert list(named(source))


@pytest.mark.parametrize(
    "source", ['"""As deepseek_v4 does."""', "from engine.families import open_family", 'x = "v4.row"']
)
def test_prose_and_the_interface_are_not(source: str) -> None:
    assert not list(named(source))
