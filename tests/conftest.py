"""For all tests: marks by place (a file named after faults, cancellation or verification mistreats processes, so it is
chaos), figures of promises, and properties that judge results, never how fast a busy machine draws examples.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.promises"]

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

MISTREATING = ("faults", "cancellation", "verification")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).stem.endswith(MISTREATING) and "unit" not in item.path.parts:
            item.add_marker(pytest.mark.chaos)
