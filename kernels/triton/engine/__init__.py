"""Triton backend of the engine's operators: decode's own kernels, torch where a device's library is as good."""

from __future__ import annotations

from dataclasses import replace

from kernels import reference

OPS = replace(reference.OPS, name="triton")
