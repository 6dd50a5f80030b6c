"""A preset given to `deepinfer up` reaches every service, so every service knows it."""

from importlib import import_module

import pytest

from fabric.settings import ServiceSettings, load

SERVICES = ("gateway", "recipe", "prefill", "decode", "kvstore")


def settings_of(service: str) -> type[ServiceSettings]:
    found = vars(import_module(f"services.{service}.settings")).values()
    [own] = [each for each in found if isinstance(each, type) and each.__module__.endswith(f"{service}.settings")]
    assert issubclass(own, ServiceSettings)
    return own


@pytest.mark.parametrize("service", SERVICES)
def test_production_serves_no_reflection(service):
    assert load(settings_of(service), []).settings.reflection
    assert not load(settings_of(service), ["--preset", "production"]).settings.reflection
    assert load(settings_of(service), ["--preset", "production", "--reflection"]).settings.reflection
