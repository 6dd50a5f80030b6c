"""The groups of the `deepinfer` command: a wrong value of an option is told in our words. Knows no command."""

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from fabric import faults


class Commands(TyperGroup):
    """Commands whose values pydantic judges, and whose users do not hear of it."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was named."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                fault = error.__cause__.errors(include_url=False, include_input=False)[0]
                said = faults.words(fault["type"], fault.get("ctx", {}))
                error.message = f"{said.message}, {said.fix}"
            raise
