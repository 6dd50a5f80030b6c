"""`deepinfer inspect`: what a checkpoint is, what its caches cost and what fits where. Loads no model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cli.console import out
from cli.engine_call import call_engine
from cli.sizes import size_of
from engine.sizes import MIB
from fabric.errors import InvalidArgument

_TIMEOUT_S = 300.0
_OPTIONS = ("tp", "ep", "memory", "sequences")
_SCALES = (1e12, 1e9, 1e6, 1e3)


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """`memory`: sizes such as 80GB of one rank; `sequences`: how many that rank serves at once.

    Where ranks or memories are not given, the engine looks at usual ones.
    """

    checkpoint: Path
    tensor: tuple[int, ...]
    expert: tuple[int, ...]
    memory: tuple[str, ...]
    sequences: int
    as_json: bool


def inspect(options: InspectOptions) -> int:
    """Prints the report. Exit code 1 when the weights do not fit the config."""
    sizes = [str(size_of(text, "--memory", least=MIB)) for text in options.memory]
    arguments: list[str] = []
    for option, values in (("--tp", options.tensor), ("--ep", options.expert), ("--memory", sizes)):
        arguments += [option, *map(str, values)] if values else []
    arguments += ["--sequences", str(options.sequences)]
    report = _asked("engine.inspect", *arguments, "--", str(options.checkpoint.absolute()))
    out.print_json(json.dumps(report)) if options.as_json else out.print(render(report))
    return 1 if report["problems"] else 0


def _asked(*command: str) -> dict[str, Any]:
    """The engine's report. Raises as `call_engine`; what is wrong with an option is called as it was typed."""
    try:
        return call_engine(*command, timeout_s=_TIMEOUT_S)
    except InvalidArgument as error:
        field = f"--{error.field}" if error.field in _OPTIONS else error.field
        raise InvalidArgument(error.message, field=field, fix=error.fix) from error


def render(report: dict[str, Any]) -> RenderableType:
    """The report as tables."""
    shown = (_summary, _parts, _storage, _caches, _groups, _windows, _ranks, _fits)
    tables: list[RenderableType] = [show(report) for show in shown]
    notes = [f"[dim]no {escape(name)} records: {escape(why)}[/]" for name, why in report["other_caches"].items()]
    if any(rank["table_bytes"] for rank in report["ranks"]):
        notes.append("[dim]Engram tables are counted as held in memory; the engine here reads their rows from disk.[/]")
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
    source = "stored here" if report["stored"] else "as published; this is a config alone"
    return (
        f"[bold]{escape(report['path'])}[/]\n"
        f"{report['family']}, {report['layers']} layers, context {report['max_context_tokens']:,} tokens\n"
        f"{_count(report['parameters'])} parameters{beside}, {_count(report['active_parameters'])} active per token, "
        f"{_size(report['weight_bytes'])} of weights ({source})"
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
    headings = ("record format", "bytes per token", "bytes per sequence", "for taking drafts back")
    return _table("KV cache", *headings, rows=rows)


def _groups(report: dict[str, Any]) -> Table:
    """One row a group, one column of record bytes a format."""
    costs = report["caches"]
    rows = [
        (
            group["name"],
            f"{group['layers']:,}",
            _kept(group),
            *(f"{cost['groups'][number]['record_bytes']:,}" for cost in costs),
        )
        for number, group in enumerate(costs[0]["groups"])
    ]
    headings = ("group", "layers", "records kept", *(cost["format"] for cost in costs))
    return _table("Bytes of one record, by group and format", *headings, rows=rows)


def _windows(report: dict[str, Any]) -> RenderableType:
    """One row for each policy that DEEPINFER_PREFILL_WINDOW_STATE may name."""
    choices = report["window_states"]
    if not choices:
        return "[bold]Window state at a prefix hit[/]\nno window is cached: hits are exact, there is nothing to choose"
    rows = [
        (
            f"{choice['window_state']}{' (default)' if choice['default'] else ''}",
            f"{choice['anchor_bytes']:,}" if choice["anchor_bytes"] else "none",
            f"{choice['recomputed_tokens']:,}",
            "approximate" if choice["window_state"] == "replay" else "exact",
        )
        for choice in choices
        if not choice["refused"]
    ]
    headings = ("window_state", "bytes of an anchor", "tokens recomputed", "answers after a hit")
    refused = (f"[dim]not {c['window_state']}: {escape(c['refused'])}[/]" for c in choices if c["refused"])
    return Group(_table("Window state at a prefix hit (bf16 records)", *headings, rows=rows), *refused)


def _kept(group: dict[str, Any]) -> str:
    """Of one layer and sequence."""
    if group["bytes_per_token"]:
        tokens = group["tokens_per_entry"]
        return "every token" if tokens == 1 else f"every {tokens} tokens"
    return f"last {group['bytes_per_sequence'] // (group['layers'] * group['record_bytes']):,}"


def _ranks(report: dict[str, Any]) -> Table:
    """What a rank has: its experts, its rows of tables, what every rank has, and the rest, divided by tensor rank."""
    parts = {"routed experts": "expert_bytes", "Engram tables": "table_bytes", "on every rank": "replicated_bytes"}
    headings = [name for name, key in parts.items() if key != "table_bytes" or any(r[key] for r in report["ranks"])]
    rows = [
        (
            f"tp {r['tensor']}, ep {r['expert']}",
            _size(r["bytes"]),
            *(_size(r[parts[name]]) for name in headings),
        )
        for r in report["ranks"]
    ]
    return _table("Weights of the largest rank", "ranks", "in all", *headings, rows=rows)


def _fits(report: dict[str, Any]) -> Table:
    """One row for ranks and memory, one column of context tokens a format."""
    formats = list(dict.fromkeys(fit["format"] for fit in report["fits"]))
    found: dict[tuple[int, int, int], dict[str, int]] = {}
    for fit in report["fits"]:
        at = (fit["tensor"], fit["expert"], fit["memory_bytes"])
        found.setdefault(at, {})[fit["format"]] = fit["context_tokens"]
    rows = [
        (f"tp {tp}, ep {ep}, {_size(memory)} each", *(f"{tokens[name]:,}" if tokens[name] else "-" for name in formats))
        for (tp, ep, memory), tokens in found.items()
    ]
    title = "What fits beside the weights, in tokens of context (-: nothing)"
    return _table(title, "ranks", *formats, rows=rows)


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
