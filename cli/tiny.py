"""`deepinfer make-tiny`: writes a tiny random checkpoint to try things with. Loads no model."""

from pathlib import Path

from rich.markup import escape

from cli.console import out
from cli.engine_call import call_engine

_TIMEOUT_S = 120.0


def make_tiny(family: str, folder: Path, seed: int, quantized: bool) -> int:
    """Writes the folder and says how to go on. Errors are raised as `call_engine` does."""
    arguments = ["--seed", str(seed), *(["--quantized"] if quantized else [])]
    made = call_engine("engine.families.tiny", *arguments, "--", family, str(folder.absolute()), timeout_s=_TIMEOUT_S)
    out.print(f"{escape(made['folder'])}: {made['family']}, {made['bytes']:,} bytes of weights", soft_wrap=True)
    out.print(f"[dim]deepinfer inspect {escape(str(folder))}[/]", soft_wrap=True)
    out.print(f"[dim]deepinfer up --model {escape(str(folder))}[/]", soft_wrap=True)
    return 0
