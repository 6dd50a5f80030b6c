"""`deepinfer kv`: what kvstores hold, whether it is sound, and to forget some of it. Knows the commands' options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli import kv_calls, kv_file, kv_show
from cli.console import harmless, megabytes, out, reports_errors
from cli.running import Running
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb

app = typer.Typer(no_args_is_help=True, help="Look into kvstores: list, stat, verify, evict, export.")

Address = Annotated[list[str] | None, typer.Option(help="host:port of a kvstore's gRPC; may be repeated.")]
Discovery = Annotated[str, typer.Option(help="Where services announce themselves; default: your running stacks.")]
Key = Annotated[str, typer.Option(help="Hexadecimal digits that keys start with.")]
Kind = Annotated[str, typer.Option(help="block or anchor.")]
Tier = Annotated[str, typer.Option(help="dram or nvme.")]
Class = Annotated[str, typer.Option("--class", help="default, chat or agent.")]
Owner = Annotated[str, typer.Option(help="Hexadecimal digits that the owner's id starts with.")]
Idle = Annotated[str, typer.Option(help="Not used for at least so long, such as 2h or 3d.")]


def _filter(key: str, kind: str, tier: str, class_: str, owner: str, idle: str) -> pb.RecordFilter:
    return pb.RecordFilter(
        key_prefix=kv_show.digits(key, "--key", kv_calls.KEY_DIGITS),
        kind=kv_show.choice(kind, kv_show.KINDS, "--kind"),
        tier=kv_show.choice(tier, kv_show.TIERS, "--tier"),
        retention=kv_show.choice(class_, kv_show.CLASSES, "--class"),
        owner=kv_show.digits(owner, "--owner", 32),
        idle_ms=kv_show.duration_ms(idle, "--idle"),
    )


@app.command("list")
@reports_errors
def list_(
    address: Address = None,
    discovery: Discovery = "",
    key: Key = "",
    kind: Kind = "",
    tier: Tier = "",
    class_: Class = "",
    owner: Owner = "",
    idle: Idle = "",
    limit: Annotated[int, typer.Option(min=0, help="Most records of each kvstore; 0: all.")] = 100,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="One line a prefix: its last block, and its size.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Whole keys.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids: they tell the prompt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each record.")] = False,
) -> int:
    """List records in the order of their keys: kind, tier, bytes, class, owner, age, idle time."""
    wanted = _filter(key, kind, tier, class_, owner, idle)
    request = pb.ListRecordsRequest(filter=wanted, limit=limit, with_tokens=tokens, ends=prefixes)
    for one in kv_calls.stores(address or (), discovery):
        if not as_json:
            out.print(f"[bold]{escape(one.name)}[/]\n{kv_show.HEADING}", soft_wrap=True)
        line = partial(kv_show.as_json, instance=one.name) if as_json else partial(kv_show.record, full=full)
        kv_calls.each(one, "ListRecords", request, partial(_print_page, line))
    return 0


@app.command()
@reports_errors
def stat(address: Address = None, discovery: Discovery = "") -> int:
    """Show what each kvstore holds and counts: tiers, hits, misses by reason, queue, damage."""
    for one in kv_calls.stores(address or (), discovery):
        for line in kv_show.counts(kv_calls.counts(one)):
            out.print(line, soft_wrap=True)
    return 0


@app.command()
@reports_errors
def verify(
    file: Annotated[Path | None, typer.Argument(help="An exported file; none: the kvstores' own records.")] = None,
    address: Address = None,
    discovery: Discovery = "",
    key: Key = "",
    tier: Tier = "",
) -> int:
    """Read records again and check every digest; a kvstore drops what is damaged. Exit code 1 when something is."""
    if file is not None:
        return _verify_file(file)
    request = pb.VerifyRecordsRequest(filter=_filter(key, "", tier, "", "", ""))
    verified = [_verify_store(one, request) for one in kv_calls.stores(address or (), discovery)]
    return 0 if all(verified) else 1


@app.command()
@reports_errors
def evict(
    address: Address = None,
    discovery: Discovery = "",
    key: Key = "",
    kind: Kind = "",
    tier: Tier = "",
    class_: Class = "",
    owner: Owner = "",
    idle: Idle = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise only what would go is told.")] = False,
) -> int:
    """Make kvstores forget records, on disk for good. Tells what would go unless --yes is given."""
    wanted = _filter(key, kind, tier, class_, owner, idle)
    if wanted == pb.RecordFilter():
        raise InvalidArgument("nothing says what shall go", field="--key", fix="give --key, --class, --owner or --idle")
    for one in kv_calls.stores(address or (), discovery):
        steps: list[pb.EvictRecordsResponse] = []
        kv_calls.each(one, "EvictRecords", pb.EvictRecordsRequest(filter=wanted, execute=yes), steps.append)
        gone = "went" if yes else "would go; --yes does it"
        records, size = (steps[-1].records, steps[-1].bytes) if steps else (0, 0)
        out.print(f"{escape(one.name)}: {records:,} records, {megabytes(size)} {gone}", soft_wrap=True)
    return 0


@app.command()
@reports_errors
def export(
    to: Annotated[Path, typer.Option(help="File to write.")],
    key: Annotated[str, typer.Option(help="Key of the last block, or its first digits.")] = "",
    tokens_file: Annotated[Path | None, typer.Option(help="Token ids of a prompt, between spaces or commas.")] = None,
    address: Address = None,
    discovery: Discovery = "",
    transport: Annotated[str, typer.Option(help="How KV moves; default: as the kvstore's stack, or ucx://.")] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Write token ids as well: they tell the prompt.")] = False,
) -> int:
    """Write one prefix, its blocks and the anchor of the last one, to a file that `kv verify` checks anywhere."""
    if bool(key) == (tokens_file is not None):
        raise InvalidArgument("one of the two is needed", field="--key", fix="give --key or --tokens-file")
    chosen = kv_calls.stores(address or (), discovery)
    if tokens_file is not None:
        one, whole = kv_calls.ends(chosen, read_tokens(tokens_file))
    else:
        one, whole = kv_calls.holder(chosen, kv_show.digits(key, "--key", kv_calls.KEY_DIGITS))
    words = (one.address, transport or one.transport or "ucx://", whole.hex(), str(to), *(["tokens"] if tokens else []))
    return subprocess.run([sys.executable, "-m", "cli.kv_fetch", "--", *words], check=False).returncode


def read_tokens(path: Path) -> list[int]:
    """Token ids of a text file. Raises InvalidArgument where it has anything else in it."""
    try:
        ids = [int(word) for word in path.read_text().replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}", field="--tokens-file", fix="name a file of numbers") from error
    if not ids or min(ids) < 0:
        raise InvalidArgument(f"{path} has no token ids", field="--tokens-file", fix="name a file of numbers")
    return ids


@dataclass(slots=True)
class _Watch:
    """Shows how a verification goes on, and remembers what it found."""

    show: Callable[[str], object]
    damaged: int = 0
    last: pb.VerifyRecordsResponse | None = None

    def take(self, reply: pb.VerifyRecordsResponse) -> None:
        self.last = reply
        for each in reply.damaged:
            self.damaged += 1
            (tier,), (kind,) = (
                [name for name, code in names.items() if code == found]
                for names, found in ((kv_show.TIERS, each.tier), (kv_show.KINDS, each.kind))
            )
            out.print(f"[bold red]damaged[/]: {kind} {each.key.hex()} in {tier}; dropped", soft_wrap=True)
        self.show(f"{reply.records:,} of {reply.total:,} records, {megabytes(reply.bytes)}")


def _verify_store(one: Running, request: pb.VerifyRecordsRequest) -> bool:
    with out.status(f"{escape(one.name)}: verifying") as status:
        watch = _Watch(lambda text: status.update(f"{escape(one.name)}: {text}"))
        kv_calls.each(one, "VerifyRecords", request, watch.take)
    records, size = (watch.last.records, watch.last.bytes) if watch.last is not None else (0, 0)
    out.print(
        f"{escape(one.name)}: {records:,} records, {megabytes(size)} read, {watch.damaged:,} damaged", soft_wrap=True
    )
    return watch.damaged == 0


def _verify_file(path: Path) -> int:
    contents, payload = kv_file.read(path)
    bad = [record for record in kv_file.damaged(contents, payload) if record is not None]
    for record in bad:
        out.print(f"[bold red]damaged[/]: {record.kind} {record.key}", soft_wrap=True)
    held = f"{len(contents.records):,} records, {contents.blocks:,} of them blocks, {megabytes(contents.payload_bytes)}"
    model = escape(harmless(contents.model_revision))
    out.print(f"{escape(str(path))}: {held}, of model {model}; {len(bad):,} damaged", soft_wrap=True)
    return 1 if bad else 0


def _print_page(line: Callable[[pb.RecordEntry], str], page: Any) -> None:
    for entry in page.records:
        out.print(line(entry), markup=False, soft_wrap=True)
