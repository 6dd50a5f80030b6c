"""Model families by architecture name: one package and one line here each. Knows names; loads nothing."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.errors import CheckpointError

_FAMILIES = {
    "DeepseekV2ForCausalLM": "engine.families.mla",
    "DeepseekV3ForCausalLM": "engine.families.mla",
    "DeepseekV32ForCausalLM": "engine.families.mla",
    "DeepseekV4ForCausalLM": "engine.families.v4",
    "DeepseekV41ForCausalLM": "engine.families.v41",
}
_MODEL_TYPES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
}


def package_of(config: dict[str, Any]) -> str:
    """The package that serves a config: `model`, `config` and `names` are modules of it. As `architecture`."""
    return _FAMILIES[architecture(config)]


def architecture(config: dict[str, Any]) -> str:
    """The architecture a config names, by `architectures` or `model_type`. Raises CheckpointError if none is known."""
    named = config.get("architectures")
    listed = list(named) if isinstance(named, list) else []
    for candidate in [*listed, _MODEL_TYPES.get(str(config.get("model_type")), "")]:
        if candidate in _FAMILIES:
            return str(candidate)
    message = f"{listed or config.get('model_type')!r} is not served here"
    fix = f"use a model of {', '.join(_FAMILIES)}"
    raise CheckpointError(message, file="config.json", item="architectures", fix=fix)
