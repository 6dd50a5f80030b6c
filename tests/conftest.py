"""Marks by place: a file named after faults, cancellation or verification mistreats processes, so it is chaos."""

from pathlib import Path

import pytest

MISTREATING = ("faults", "cancellation", "verification")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).stem.endswith(MISTREATING) and "unit" not in item.path.parts:
            item.add_marker(pytest.mark.chaos)
