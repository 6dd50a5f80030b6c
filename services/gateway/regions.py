"""Regions: starts of prompts that tenants share by their operator's will. Knows their texts; compares no prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints, model_validator

from fabric.settings import Section
from protos.deepinfer.v1 import recipe_pb2

_MAX_CHARS = 1 << 20
_MAX_TOKENS = 1 << 17

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Text = Annotated[SecretStr, Field(min_length=1, max_length=_MAX_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True, slots=True)
class Opening:
    """What the prompts of a region start with: a chat's system message, a text, or tokens of one model. One is set."""

    system: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()

    def render(self, model: str) -> recipe_pb2.RenderRequest:
        """What a recipe turns into the region's tokens, and perhaps a few more that are the same for everybody."""
        if self.text:
            return recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_TEXT, text=self.text)
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": ""}]
        body = json.dumps({"model": model, "messages": messages}).encode()
        return recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_OPENAI_CHAT, body=body)


@dataclass(frozen=True, slots=True)
class Region:
    """A shared start of prompts; `salt` keys its blocks for all tenants that take part."""

    name: str
    salt: bytes
    opening: Opening


class RegionSettings(Section, frozen=True):
    """One region: `tenants` share the cached KV of prompts as far as these start with `system`, `text` or `token_ids`.

    Of each other's prompts they can then learn that much by timing: whether somebody used this start before.
    """

    name: Name
    tenants: Annotated[tuple[str, ...], Field(min_length=2)]
    system: Text | None = None
    text: Text | None = None
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=_MAX_TOKENS)] | None = None

    @model_validator(mode="after")
    def _one_opening(self) -> RegionSettings:
        if sum(each is not None for each in (self.system, self.text, self.token_ids)) != 1:
            raise ValueError("give one of system, text and token_ids")
        return self

    @property
    def opening(self) -> Opening:
        system, text = (each.get_secret_value() if each is not None else "" for each in (self.system, self.text))
        return Opening(system, text, self.token_ids or ())
