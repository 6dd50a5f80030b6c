"""What `deepinfer kv` understands and shows: times, digits, names, one line a record, tokens only where they came."""

from __future__ import annotations

import json

import pytest

from cli import kv_show
from cli.kv import read_tokens
from cli.kv_calls import Chains
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2 as store

KEY = bytes(range(32))
ENTRY = pb.RecordEntry(
    kind=store.RECORD_KIND_BLOCK,
    key=KEY,
    tiers=[pb.RECORD_TIER_DRAM, pb.RECORD_TIER_NVME],
    size=1_048_576,
    age_ms=90_000,
    idle_ms=400,
    retention=common.RETENTION_CLASS_AGENT,
    owner="ab" * 16,
)


def test_a_record_is_one_line_under_its_heading() -> None:
    line = kv_show.record(ENTRY, full=False)
    assert line.split() == [
        "0001020304050607", "block", "dram+nvme", "1,048,576", "agent", "abababab", "90.0", "s", "400", "ms",
    ]  # fmt: skip
    assert len(line) == len(kv_show.HEADING)
    assert KEY.hex() in kv_show.record(ENTRY, full=True)


def test_what_is_not_known_is_shown_as_such() -> None:
    bare = pb.RecordEntry(
        kind=store.RECORD_KIND_ANCHOR, key=KEY, tiers=[pb.RECORD_TIER_NVME], size=5, idle_ms=9 * 86_400_000
    )
    assert kv_show.record(bare, full=False).split()[1:] == ["anchor", "nvme", "5", "-", "-", "-", "9.0", "d"]
    told = json.loads(kv_show.as_json(bare, "one"))
    assert told["age_s"] is None and told["class"] is None and told["owner"] is None and told["idle_s"] == 777_600.0


def test_tokens_are_shown_only_where_they_came_along() -> None:
    assert "token" not in kv_show.record(ENTRY, full=True) and "token_ids" not in json.loads(kv_show.as_json(ENTRY, ""))
    with_tokens = pb.RecordEntry()
    with_tokens.CopyFrom(ENTRY)
    with_tokens.token_ids.extend([7, 8])
    assert kv_show.record(with_tokens, full=False).endswith("tokens 7 8")
    assert json.loads(kv_show.as_json(with_tokens, ""))["token_ids"] == [7, 8]


@pytest.mark.parametrize(("text", "wanted"), [("", 0), ("90s", 90_000), ("1.5h", 5_400_000), ("3 d", 259_200_000)])
def test_times_have_units(text, wanted) -> None:
    assert kv_show.duration_ms(text, "--idle") == wanted


def test_wrong_words_are_refused_by_the_name_of_their_option() -> None:
    for wrong, option in (
        (lambda: kv_show.duration_ms("5", "--idle"), "--idle"),
        (lambda: kv_show.digits("xyz", "--key", 64), "--key"),
        (lambda: kv_show.digits("a" * 65, "--key", 64), "--key"),
        (lambda: kv_show.choice("tape", kv_show.TIERS, "--tier"), "--tier"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            wrong()
        assert refused.value.field == option and refused.value.fix


@pytest.mark.parametrize(("blocks", "shown"), [(1, "1 block, 100 kB"), (4, "4 blocks, 399 kB")])
def test_a_prefix_says_how_much_of_it_is_held(blocks, shown) -> None:
    entry = pb.RecordEntry(
        kind=store.RECORD_KIND_BLOCK, key=KEY, prefix=pb.PrefixSize(blocks=blocks, bytes=99_840 * blocks)
    )
    assert kv_show.record(entry, full=False).endswith(shown)


def test_the_lines_of_counts_name_every_tier_and_reason() -> None:
    dram = pb.TierCounts(tier=pb.RECORD_TIER_DRAM, capacity_bytes=100_000_000, used_bytes=25_000_000, records=1234)
    nvme = pb.TierCounts(tier=pb.RECORD_TIER_NVME, capacity_bytes=1, queued=7, events={"written": 5, "damaged": 2})
    reply = pb.ReadCountsResponse(instance="one", tiers=[dram, nvme], hits=3, misses={"absent": 4}, corrupt=6)
    text = "\n".join(kv_show.counts(reply))
    for part in (
        "one",
        "25 %".replace(" ", ""),
        "1,234 records",
        "7 wait",
        "damaged 2, written 5",
        "absent 4",
        "6 found in DRAM",
    ):
        assert part in text


def test_token_files_are_numbers_between_anything_usual(tmp_path) -> None:
    path = tmp_path / "ids"
    path.write_text("[1, 2,3\n4]")
    assert read_tokens(path) == [1, 2, 3, 4]
    for wrong in ("", "1 x", "-1"):
        path.write_text(wrong)
        with pytest.raises(InvalidArgument):
            read_tokens(path)


def page(*blocks: tuple[bytes, bytes, list[int]]) -> pb.ListRecordsResponse:
    return pb.ListRecordsResponse(
        records=[pb.RecordEntry(key=key, parent_key=parent, token_ids=tokens) for key, parent, tokens in blocks]
    )


def test_the_longest_prefixes_of_tokens_are_found_in_any_order_and_told_apart_by_key() -> None:
    root, a, b, c, x, y = (bytes([number]) * 32 for number in range(6))
    chains = Chains([1, 2, 3, 4, 5, 6, 7])
    chains.take(page((c, b, [5, 6]), (a, root, [1, 2]), (y, x, [9, 9])))
    chains.take(page((b, a, [3, 4]), (x, root, [3, 4])))  # x: the right tokens at the wrong place
    assert chains.longest() == ([c], 6)
    chains.take(
        page(
            (y, root, [1, 2]),
        )
    )
    assert chains.longest() == ([c], 6)  # another tenant's, shorter
    assert Chains([8, 8]).longest() == ([], 0)
