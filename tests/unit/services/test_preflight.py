"""`--check` refuses what a start refuses: it runs what every start runs first, before it opens anything."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric import preflight
from fabric.errors import StartError
from fabric.server import Chassis
from fabric.settings import ServiceSettings
from services.decode.settings import DecodeSettings
from services.gateway.build import check as check_gateway
from services.gateway.settings import GatewaySettings
from services.kvstore.preflight import check as check_kvstore
from services.kvstore.settings import KvStoreSettings
from services.prefill.settings import PrefillSettings
from services.recipe.service import check as check_recipe
from services.recipe.settings import RecipeSettings
from services.worker.preflight import check as check_worker
from tests.support import procs

SERVICES: dict[str, tuple[type[ServiceSettings], Callable[[Any], None]]] = {
    "gateway": (GatewaySettings, check_gateway),
    "recipe": (RecipeSettings, check_recipe),
    "prefill": (PrefillSettings, check_worker),
    "decode": (DecodeSettings, check_worker),
    "kvstore": (KvStoreSettings, check_kvstore),
}
NOPE = Path("/nope")


def fault(service: str, **settings: Any) -> StartError:
    """What `--check` says, and what a start says, which opens nothing before it."""
    kind, own = SERVICES[service]
    given = kind(**{"discovery": "memory://preflight"} | settings)
    with pytest.raises(StartError) as checked:
        preflight.check(given, own)
    return checked.value


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("service", SERVICES)
def test_settings_that_can_be_met_pass(service: str) -> None:
    kind, own = SERVICES[service]
    preflight.check(
        kind(discovery="memory://preflight", **{"http": "127.0.0.1:0"} if service == "gateway" else {}), own
    )


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("failpoints", "no.such.point=exit"),
        ("failpoints", "nonsense"),
        ("discovery", "consul://x"),
        ("discovery", "etcd://nowhere"),
        ("listen", "here"),
        ("metrics", "127.0.0.1:70000"),
        ("advertise", "somewhere"),
        ("ready_file", NOPE / "ready"),
    ],
)
def test_what_no_service_can_start_with_is_named(service: str, setting: str, value: Any) -> None:
    error = fault(service, **{setting: value})
    assert error.field == setting and error.fix


@pytest.mark.parametrize(
    ("service", "setting", "settings"),
    [
        ("decode", "model", {"model": NOPE}),
        ("prefill", "model", {"model": NOPE}),
        ("recipe", "model", {"model": NOPE}),
        ("decode", "transport", {"transport": "pigeon://"}),
        ("decode", "transport", {"transport": "tcp://x:port"}),
        ("decode", "transport", {"transport": "ucx://?expect=pigeon"}),
        ("decode", "kv_memory_mb", {"kv_memory_mb": 1}),
        ("prefill", "chunk_tokens", {"chunk_tokens": 2, "max_sequences": 16}),
        ("decode", "kernels", {"kernels": "cuda"}),
        ("decode", "device", {"device": "cuda:9"}),
        ("recipe", "dialect", {"dialect": "template"}),
        ("gateway", "keys_file", {"keys_file": NOPE}),
        ("gateway", "http", {"http": "8000"}),
        ("gateway", "regions[0].tenants", {"regions": ({"name": "r", "tenants": ("a", "b"), "system": "x"},)}),
        ("decode", "kv_memory_mb", {"kv_memory_mb": 1 << 30}),
        ("prefill", "landing_mb", {"landing_mb": 1 << 30}),
        ("kvstore", "memory_mb", {"memory_mb": 1 << 30}),
        ("kvstore", "landing_mb", {"landing_mb": 1 << 30}),
        ("kvstore", "index", {"index": "mysql://x"}),
        ("kvstore", "index", {"index": "redis://x:port"}),
        ("kvstore", "nvme_dir", {"nvme_dir": Path("/dev/null/store")}),
        ("kvstore", "transport", {"transport": "pigeon://"}),
    ],
)
def test_what_one_service_cannot_start_with_is_named(service: str, setting: str, settings: dict[str, Any]) -> None:
    error = fault(service, **settings)
    assert error.field == setting and error.fix
    assert "model_dir" not in str(error)


def test_ports_that_are_taken_or_named_twice_are_told_before_anything_is_opened(taken: str) -> None:
    for field in GatewaySettings.doors:
        assert fault("gateway", **{"http": "127.0.0.1:0"} | {field: taken}).field == field
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    error = fault("gateway", listen=free, http=free)
    assert error.field == "http" and "--listen as well" in error.message


def test_a_directory_that_another_kvstore_has_is_told(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fault("kvstore", nvme_dir=tmp_path).field == "nvme_dir"
    check_kvstore(KvStoreSettings(nvme_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


async def test_a_start_builds_nothing_before_its_preflight_passed() -> None:
    built: list[Any] = []
    settings = DecodeSettings(discovery="memory://preflight", model=NOPE)
    with pytest.raises(StartError) as caught:
        await Chassis(settings, built.append, check_worker).start()  # type: ignore[arg-type]
    assert (caught.value.field, built) == ("model", [])


def test_the_command_names_the_flag_that_was_typed_and_compiles_nothing_first(tmp_path: Path) -> None:
    for ask in (("--check",), ()):
        command = procs.python("-m", "services.decode", "--discovery", "memory://", "--model", "/nope", *ask)
        with procs.spawn(command, tmp_path / "log") as process:
            assert process.wait() == 1
            said = process.tail()
        assert "--model" in said and "/nope" in said and "model_dir" not in said and "compil" not in said, said
