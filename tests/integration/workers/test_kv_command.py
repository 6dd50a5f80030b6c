"""`deepinfer kv` against a store that prefill filled: lists, verifies, exports and evicts what is really there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli import kv_fetch, kv_file
from cli.main import app
from engine.sampling.params import SamplingParams
from fabric.errors import NotFound, ServiceError
from services.kvstore.index import Tier
from services.kvstore.records import ROOT, RecordId, RecordKind
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 400 for index in range(700)]
BLOCKS = len(TOKENS) // 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@asynccontextmanager
async def filled(model: Path, oracle: Oracle, transport: str = "inproc://", **store: object) -> AsyncIterator[Stack]:
    """A stack whose store holds the blocks of one prompt."""
    async with worker_stack(model, transport=transport, store=store) as stack:
        assert (await stack.ask(TOKENS, GREEDY)).tokens == oracle.answer(TOKENS, GREEDY)
        await stack.idle()
        if tiers(stack).nvme is not None:
            async with asyncio.timeout(10.0):
                await tiers(stack).nvme.drained()
        yield stack


def tiers(stack: Stack):
    return stack.running["kvstore"].servicer.store.tiers


def last_key(stack: Stack) -> bytes:
    """Key of the block that no other one continues."""
    records = [tiers(stack).dram.by_id(record) for record in tiers(stack).dram.ids if record.kind is RecordKind.BLOCK]
    (last,) = {record.id.key for record in records} - {record.parent for record in records}
    return last


def spoil(folder: Path) -> None:
    """Some bytes of one record in the only segment."""
    (segment,) = folder.glob("*.segment")
    with segment.open("r+b") as file:
        file.seek(segment.stat().st_size // 2)
        file.write(b"\xaa\x55" * 64)


def is_empty(folder: Path) -> bool:
    return list(folder.iterdir()) == []


async def command(stack: Stack, *words: str) -> Result:
    """The command as a user gives it, in a thread: it runs an event loop of its own."""
    address = stack.running["kvstore"].address
    return await asyncio.to_thread(CliRunner().invoke, app, ["kv", *words, "--address", address])


def listed(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


async def test_list_tells_every_record_once_and_filters(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path) as stack:
        every = listed(await command(stack, "list", "--json"))
        assert {(each["kind"], each["key"]) for each in every} == {
            (record.kind, record.key.hex()) for record in tiers(stack).dram.ids
        }
        assert [each["key"] for each in every] == sorted(each["key"] for each in every)
        assert all(set(each["tiers"]) == {"dram", "nvme"} and "token_ids" not in each for each in every)
        blocks = listed(await command(stack, "list", "--json", "--kind", "block"))
        assert len(blocks) == sum(each["kind"] == "block" for each in every) >= BLOCKS
        one = listed(await command(stack, "list", "--json", "--key", blocks[2]["key"], "--kind", "block"))
        assert [each["key"] for each in one] == [blocks[2]["key"]]
        assert len(listed(await command(stack, "list", "--json", "--limit", "2"))) == 2
        assert listed(await command(stack, "list", "--json", "--idle", "1d")) == []
        plain = await command(stack, "list")
        assert plain.output.count("\n") == len(every) + 2


async def test_tokens_and_parents_come_only_where_they_are_asked_for_from_either_tier(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path) as stack:
        for record in list(tiers(stack).dram.ids)[::2]:
            tiers(stack).dram.drop(tiers(stack).dram.by_id(record))
        told = {
            each["key"]: each for each in listed(await command(stack, "list", "--json", "--tokens", "--kind", "block"))
        }
        first = next(each for each in told.values() if each["parent"] == ROOT.hex())
        assert first["token_ids"] == TOKENS[:128]
        assert {each["parent"] for each in told.values()} <= {ROOT.hex(), *told}


async def test_prefixes_are_told_by_their_ends_and_what_nobody_can_use_is_marked(model: Path, oracle: Oracle) -> None:
    async with filled(model, oracle) as stack:
        dram, key = tiers(stack).dram, last_key(stack)
        blocks = [dram.by_id(record) for record in dram.ids if record.kind is RecordKind.BLOCK]
        whole = {"blocks": len(blocks), "bytes": sum(block.size for block in blocks), "cut": False}
        (told,) = listed(await command(stack, "list", "--prefixes", "--json"))
        assert (told["key"], told["prefix"]) == (key.hex(), whole)
        dram.drop(next(block for block in blocks if block.parent == ROOT))
        (told,) = listed(await command(stack, "list", "--prefixes", "--json"))
        assert told["prefix"]["cut"] and told["prefix"]["blocks"] == len(blocks) - 1
        assert "its start is missing" in (await command(stack, "list", "--prefixes")).output


async def test_stat_counts_both_tiers_and_what_was_looked_up(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path) as stack:
        output = (await command(stack, "stat")).output
        dram, nvme = tiers(stack).dram, tiers(stack).nvme
        assert f"{len(dram)} records" in output and f"written {nvme.counts.written}" in output
        assert "misses: absent 1" in output and "0 found in DRAM" in output


async def test_verify_finds_and_drops_what_is_damaged_and_nothing_else(model: Path, oracle: Oracle) -> None:
    async with filled(model, oracle) as stack:
        assert (await command(stack, "verify")).exit_code == 0
        dram = tiers(stack).dram
        victim = dram.by_id(RecordId(RecordKind.BLOCK, last_key(stack)))
        before = set(dram.ids)
        dram.memory[victim.offset + victim.size - 1] ^= 1
        found = await command(stack, "verify")
        assert found.exit_code == 1 and victim.id.key.hex() in found.output and "1 damaged" in found.output
        lost = {victim.id, RecordId(RecordKind.ANCHOR, victim.id.key)} & before  # it takes its anchor along
        assert before - set(dram.ids) == lost
        assert "1 found in DRAM" in (await command(stack, "stat")).output
        assert (await command(stack, "verify")).exit_code == 0


async def test_damage_on_disk_costs_the_disk_alone(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path) as stack:
        spoil(tmp_path)
        found = await command(stack, "verify")
        assert found.exit_code == 1 and "in nvme" in found.output
        kept = listed(await command(stack, "list", "--json"))
        assert [each["tiers"] for each in kept].count(["dram"]) == 1
        on_disk = [(each["kind"], each["key"]) for each in kept if "nvme" in each["tiers"]]
        asked = listed(await command(stack, "list", "--json", "--tier", "nvme"))
        assert [(each["kind"], each["key"]) for each in asked] == on_disk


async def test_evict_tells_first_and_does_it_only_with_yes(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path) as stack:
        key, held = last_key(stack).hex(), set(tiers(stack).dram.ids)
        assert (await command(stack, "evict", "--key", key)).output.count("would go") == 1
        assert set(tiers(stack).dram.ids) == held
        done = await command(stack, "evict", "--key", key, "--yes")
        gone = {record for record in held if record.key.hex() == key}
        assert f"{len(gone)} records" in done.output and held - set(tiers(stack).dram.ids) == gone
        assert all(tiers(stack).nvme.known(record) is None for record in gone)
        await stack.restart("kvstore")
        async with asyncio.timeout(10.0):
            while len(tiers(stack).nvme) < len(held - gone):  # noqa: ASYNC110 - recovery announces it to nobody here
                await asyncio.sleep(0.005)
        assert all(tiers(stack).nvme.known(record) is None for record in gone)  # not even by a restart
        assert tiers(stack).nvme.counts.damaged == 0


async def test_evicting_everything_by_mistake_is_refused(model: Path, oracle: Oracle) -> None:
    async with filled(model, oracle) as stack:
        held = set(tiers(stack).dram.ids)
        assert (await command(stack, "evict", "--yes")).exit_code == 1
        assert set(tiers(stack).dram.ids) == held


@pytest.mark.parametrize("evicted", [None, Tier.DRAM])
async def test_an_exported_prefix_is_what_the_store_holds_anchor_included(
    model: Path, oracle: Oracle, tmp_path: Path, evicted: Tier | None
) -> None:
    async with filled(model, oracle, nvme_dir=tmp_path / "nvme") as stack:
        dram, key = tiers(stack).dram, last_key(stack)
        wanted = {record: b"".join(bytes(v) for _, v in dram.views(dram.by_id(record))) for record in dram.ids}
        if evicted is Tier.DRAM:
            while dram.ids:
                dram.drop(dram.by_id(next(iter(dram.ids))))
        address, path = stack.running["kvstore"].address, tmp_path / "file"
        contents = await kv_fetch.export(address, "inproc://", key, path, with_tokens=True)
        assert (contents, kv_file.read(path)[0].blocks) == (kv_file.read(path)[0], contents.blocks)
        assert all(bad is None for bad in kv_file.damaged(*kv_file.read(path)))
        payload = kv_file.read(path)[1]
        for record in contents.records:
            found = payload[record.offset : record.offset + record.size].tobytes()
            assert found == wanted[RecordId(RecordKind(record.kind), bytes.fromhex(record.key))]
        assert contents.records[-1].kind == "anchor"
        told = [token for record in contents.records[: contents.blocks] for token in record.token_ids]
        assert told[: len(TOKENS) // 128 * 128] == TOKENS[: len(TOKENS) // 128 * 128]


async def test_a_prefix_that_is_not_whole_is_refused_and_leaves_no_file(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with filled(model, oracle) as stack:
        dram, key = tiers(stack).dram, last_key(stack)
        first = next(r for r in dram.ids if r.kind is RecordKind.BLOCK and dram.by_id(r).parent == ROOT)
        dram.drop(dram.by_id(first))
        with pytest.raises(NotFound, match=first.key.hex()):
            await kv_fetch.export(stack.running["kvstore"].address, "inproc://", key, tmp_path / "file", False)
        assert is_empty(tmp_path)


async def test_damage_met_on_the_way_leaves_no_file(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with filled(model, oracle) as stack:
        dram, key = tiers(stack).dram, last_key(stack)
        victim = dram.by_id(RecordId(RecordKind.BLOCK, key))
        dram.memory[victim.offset] ^= 1
        with pytest.raises(ServiceError):
            await kv_fetch.export(stack.running["kvstore"].address, "inproc://", key, tmp_path / "file", False)
        assert is_empty(tmp_path)


async def test_the_command_exports_by_key_or_by_tokens_from_another_process(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, TOKENS)))
    async with filled(model, oracle, transport="tcp://127.0.0.1:0") as stack:
        digits = last_key(stack).hex()[:12]
        for number, words in enumerate((("--key", digits), ("--tokens-file", str(ids)))):
            path = tmp_path / str(number)
            done = await command(stack, "export", *words, "--to", str(path), "--transport", "tcp://127.0.0.1:0")
            assert done.exit_code == 0, done.output
            assert CliRunner().invoke(app, ["kv", "verify", str(path)]).exit_code == 0
            assert b'token_ids": [' not in path.read_bytes()
