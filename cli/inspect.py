"""`deepinfer inspect`: what a checkpoint is, what its caches cost and what fits where. Loads no model."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cli.console import out
from cli.engine_call import call_engine
from fabric.errors import InvalidArgument

_TIMEOUT_S = 300.0
_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SCALES = (1e12, 1e9, 1e6, 1e3)


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """`memory`: sizes such as 80GB of one rank; `sequences`: how many that rank serves at once."""

    checkpoint: Path
    tensor: tuple[int, ...]
    expert: tuple[int, ...]
    memory: tuple[str, ...]
    sequences: int
    as_json: bool


def inspect(options: InspectOptions) -> int:
    """Prints the report. Exit code 1 when the weights do not fit the config."""
    sizes = [str(size_of(text)) for text in options.memory]
    arguments = ["--tp", *map(str, options.tensor), "--ep", *map(str, options.expert)]
    arguments += ["--memory", *sizes] if sizes else []
    arguments += ["--sequences", str(options.sequences)]
    report = call_engine("engine.inspect", *arguments, "--", str(options.checkpoint.absolute()), timeout_s=_TIMEOUT_S)
    out.print_json(json.dumps(report)) if options.as_json else out.print(render(report))
    return 1 if report["problems"] else 0


def size_of(text: str) -> int:
    """Bytes of a size such as 80GB or 141GiB. Raises InvalidArgument."""
    found = _SIZE_TEXT.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise InvalidArgument(f"{text!r} is not a size", field="--memory", fix="give one such as 80GB or 141GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def render(report: dict[str, Any]) -> RenderableType:
    """The report as tables."""
    tables: list[RenderableType] = [
        _summary(report),
        _parts(report),
        _storage(report),
        _caches(report),
        _groups(report),
        _ranks(report),
    ]
    if report["fits"]:
        tables.append(_fits(report))
    notes = [f"[dim]{escape(name)}: {escape(why)}[/]" for name, why in report["other_caches"].items()]
    problems = [f"[bold red]problem[/]: {escape(problem)}" for problem in report["problems"]]
    return Group(*(part for table in tables for part in (table, "")), *notes, *problems)


def _table(title: str, *headings: str, rows: Sequence[tuple[object, ...]]) -> Table:
    """The first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def _summary(report: dict[str, Any]) -> str:
    kinds = [(kind, report[f"{kind}_parameters"]) for kind in ("draft", "vision")]
    beside = "".join(f" + {_count(count)} {kind}" for kind, count in kinds if count)
    source = "stored" if report["stored"] else "as published (there are none here)"
    return (
        f"[bold]{escape(report['path'])}[/]\n"
        f"{report['family']}, {report['layers']} layers, context {report['max_context_tokens']:,} tokens\n"
        f"{_count(report['parameters'])} parameters{beside}, {_count(report['active_parameters'])} active per token, "
        f"{_size(report['weight_bytes'])} of weights {source}"
    )


def _parts(report: dict[str, Any]) -> Table:
    rows = [
        (part["part"], f"{part['parameters']:,}", f"{part['active']:,}", f"{part['bytes']:,}")
        for part in report["parts"]
    ]
    if report["elsewhere_bytes"]:
        rows.append(("not loaded as text", "", "", f"{report['elsewhere_bytes']:,}"))
    return _table("Parameters", "part", "parameters", "active per token", "bytes", rows=rows)


def _storage(report: dict[str, Any]) -> Table:
    if report["stored"]:
        rows = [(stored["type"], f"{stored['tensors']:,}", f"{stored['bytes']:,}") for stored in report["stored"]]
        return _table("Stored", "type", "tensors", "bytes", rows=rows)
    published = [(name, f"{size:,}") for name, size in report["formats"].items()]
    return _table("Published storage", "format", "bytes", rows=published)


def _caches(report: dict[str, Any]) -> Table:
    rows = [
        (
            cost["format"],
            _exact(cost["bytes_per_token"]),
            f"{cost['bytes_per_sequence']:,}",
            f"{cost['rollback_bytes']:,}",
        )
        for cost in report["caches"]
    ]
    return _table("KV cache", "record format", "bytes per token", "bytes per sequence", "and for rollback", rows=rows)


def _groups(report: dict[str, Any]) -> Table:
    rows = [
        (
            group["name"],
            cost["format"],
            f"{group['layers']:,}",
            group["tokens_per_entry"],
            f"{group['record_bytes']:,}",
            _exact(group["bytes_per_token"]),
            f"{group['bytes_per_sequence']:,}",
        )
        for cost in report["caches"]
        for group in cost["groups"]
    ]
    headings = ("group", "format", "layers", "tokens per record", "record bytes", "per token", "per sequence")
    return _table("KV cache by group", *headings, rows=rows)


def _ranks(report: dict[str, Any]) -> Table:
    rows = [
        (
            f"tp {r['tensor']}, ep {r['expert']}",
            f"{r['bytes']:,}",
            f"{r['expert_bytes']:,}",
            f"{r['replicated_bytes']:,}",
        )
        for r in report["ranks"]
    ]
    return _table("Weights per rank", "ranks", "bytes", "routed experts", "on every rank", rows=rows)


def _fits(report: dict[str, Any]) -> Table:
    rows = [
        (
            f"{_size(fit['memory_bytes'])}, tp {fit['tensor']}, ep {fit['expert']}",
            fit["format"],
            f"{fit['context_tokens']:,}" if fit["context_tokens"] else "nothing",
        )
        for fit in report["fits"]
    ]
    return _table("What fits beside the weights", "memory of a rank", "record format", "context tokens", rows=rows)


def _exact(size: float) -> str:
    return f"{size:,.2f}".rstrip("0").rstrip(".")


def _count(number: float) -> str:
    return _scaled(number, "TBMk")


def _size(number: float) -> str:
    return _scaled(number, ("TB", "GB", "MB", "kB", "B"))


def _scaled(number: float, units: Sequence[str]) -> str:
    """Four digits and a unit of 1000s; `units` from 1e12 down, for less than 1000 the fifth if there is one."""
    for scale, unit in zip(_SCALES, units, strict=False):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return " ".join([f"{number:.0f}", *units[4:]])
