"""Model families by architecture name: one package and one line here each. Knows names; loads nothing."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.errors import CheckpointError

_FAMILIES = {  # architecture -> model type, package
    "DeepseekV2ForCausalLM": ("deepseek_v2", "engine.families.mla"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "engine.families.mla"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "engine.families.mla"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "engine.families.v4"),
    "DeepseekV41ForCausalLM": ("deepseek_v41", "engine.families.v41"),
}


def packages() -> tuple[str, ...]:
    """Every family's package. Its modules `model`, `config`, `names`, `facts` and `tiny` are asked for by name."""
    return tuple(dict.fromkeys(package for _, package in _FAMILIES.values()))


def names() -> tuple[str, ...]:
    """The families' short names, such as "v32"."""
    return tuple(model_type.removeprefix("deepseek_") for model_type, _ in _FAMILIES.values())


def package_of(config: dict[str, Any]) -> str:
    """The package that serves a config. As `architecture`."""
    return _FAMILIES[architecture(config)][1]


def architecture(config: dict[str, Any]) -> str:
    """The architecture a config names, by `architectures` or `model_type`. Raises CheckpointError if none is known."""
    named = config.get("architectures")
    listed = list(named) if isinstance(named, list) else []
    typed = [name for name, (model_type, _) in _FAMILIES.items() if model_type == config.get("model_type")]
    for candidate in [*listed, *typed]:
        if isinstance(candidate, str) and candidate in _FAMILIES:
            return candidate
    message = f"{listed or config.get('model_type')!r} is not served here"
    fix = f"use a model of {', '.join(_FAMILIES)}"
    raise CheckpointError(message, file="config.json", item="architectures", fix=fix)
