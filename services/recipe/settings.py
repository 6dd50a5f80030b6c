"""Settings of the recipe service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from fabric.settings import ServiceSettings

_NANO = Path(__file__).parents[2] / "models" / "nano"


class RecipeSettings(ServiceSettings, env_prefix="DEEPINFER_RECIPE_"):
    """The recipe service: turns protocol requests into tokens, and tokens into protocol events."""

    model: Path = Field(_NANO, description="directory with config.json and tokenizer.json")
    model_name: str = Field("", description="name that clients use; default: the directory's name")
    dialect: Literal["auto", "v4", "template", "plain"] = Field(
        "auto", description="text form of chats: V4's encoding, the model's own chat template, or none (Generate only)"
    )
    encoding: Literal["auto", "v4", "v4.1"] = Field("auto", description="version of V4's encoding")
    template_timeout_s: float = Field(10.0, gt=0, description="longest that a chat template may render, in seconds")
    threads: int = Field(2, ge=1, description="threads that render prompts")
    max_waiting: int = Field(512, ge=1, description="most prompts that wait for a thread; more are refused")
    max_request_bytes: int = Field(4 << 20, ge=1024, description="largest request or text to render")
    max_parse_tokens: int = Field(4096, ge=1, description="most tokens that one Parse message may carry")

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or self.model.resolve().name
