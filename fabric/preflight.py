"""Preflight: whether a service could start with its settings, told before anything is opened, contacted or compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fabric import failpoints, lifecycle
from fabric.discovery import open_discovery
from fabric.errors import StartError
from fabric.processes import claim_name
from fabric.settings import ServiceSettings

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)
Preflight = Callable[[SettingsT], None]


def check(settings: SettingsT, own: Preflight[SettingsT] | None = None) -> None:
    """What every start runs first, and `--check` alone. `own`: what this service adds to it, if anything.

    Only what another machine or a device has to say is left to the start: discovery, the index, the lane that the
    transport finds. An instance's name is taken here, for as long as this process lives.

    Raises:
        StartError: a setting cannot be met; names it and the fix.
    """
    _doors(settings)
    if settings.advertise:
        lifecycle.split_address(settings.advertise, "advertise")
    open_discovery(settings.discovery)
    failpoints.check(settings.failpoints)
    if settings.ready_file is not None:
        _place(settings.ready_file)
    if settings.instance:
        claim_name(f"{settings.service_name()}/{settings.instance}")
    if own is not None:
        own(settings)


def memory(wanted_mb: Mapping[str, int]) -> None:
    """What settings ask for, in MiB, is no more than this machine has.

    Raises:
        StartError: it is more; names the setting that asks for most.
    """
    have_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    asked_mb = sum(wanted_mb.values())
    if asked_mb > have_mb:
        field = max(wanted_mb, key=lambda name: wanted_mb[name])
        fix = f"use at most {max(0, have_mb - asked_mb + wanted_mb[field]):,}"
        raise StartError(f"{asked_mb:,} MiB are asked for, this machine has {have_mb:,}", field=field, fix=fix)


def _doors(settings: ServiceSettings) -> None:
    """Every address that is listened on is free, and no two are one."""
    seen: dict[tuple[str, int], str] = {}
    for field in settings.doors:
        address = str(getattr(settings, field))
        lifecycle.check_port_free(address, field)
        at = lifecycle.split_address(address, field)
        if at[1] and (other := seen.setdefault(at, field)) != field:
            fix = "choose two ports, or 0 for a free one"
            raise StartError(f"{address} is --{other} as well", field=field, fix=fix)


def _place(file: Path) -> None:
    """A file can be made there."""
    folder = file.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is no folder that can be written" if folder.exists() else "does not exist"
        fix = "name a file in a folder that exists, is writable and has room"
        raise StartError(f"cannot write {file}: {folder} {why}", field="ready_file", fix=fix)
