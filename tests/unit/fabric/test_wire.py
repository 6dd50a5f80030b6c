"""What crosses the network comes back as it was."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import wire
from fabric.records import Extent, Landing, LinkAddress
from fabric.wire import ErrorDetail
from protos.deepinfer.v1 import common_pb2 as pb

TEXT, U32, U64 = st.text(max_size=30), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ADDRESSES = st.builds(LinkAddress, TEXT, TEXT, U64, st.binary(max_size=50))


@settings(deadline=None)
@given(st.builds(Landing, TEXT, ADDRESSES, st.binary(max_size=24), U64, U64))
def test_landings_round_trip(landing):
    packed = wire.pack_landing(landing).SerializeToString()
    assert wire.unpack_landing(pb.Landing.FromString(packed)) == landing


@settings(deadline=None)
@given(st.lists(st.builds(Extent, TEXT, U32, U32, U64, U64, U64), max_size=5))
def test_extents_round_trip(extents):
    packed = wire.pack_extents(extents).SerializeToString()
    assert wire.unpack_extents(pb.ExtentList.FromString(packed)) == tuple(extents)


@settings(deadline=None)
@given(st.builds(ErrorDetail, TEXT, TEXT, TEXT, TEXT, st.booleans(), st.just(0.25), TEXT))
def test_error_details_round_trip(detail):
    assert wire.load_error(wire.dump_error(detail)) == detail


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_detail_or_none(packed):
    assert isinstance(wire.load_error(packed), ErrorDetail | None)


class Kind(StrEnum):
    GLOBAL = "global"
    WINDOW = "window"


@dataclass(frozen=True)
class Group:
    name: str
    kind: Kind
    layers: int = 3
    entries: int = 32
    tokens_per_entry: int = 4
    record_bytes: int = 512
    dtype: str = "float32"
    record_version: str = "v4.csa.float32.1"


@dataclass(frozen=True)
class Replay:
    tokens: int = 0
    decoder: bool = False
    handoff: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Layout:
    fingerprint: str = "ab12"
    records_fingerprint: str = "cd34"
    block_tokens: int = 128
    max_rollback: int = 8
    groups: tuple[Group, ...] = (Group("csa", Kind.GLOBAL), Group("window", Kind.WINDOW))
    replay: Replay = Replay()


def test_a_layout_is_packed_field_by_field():
    packed = wire.pack_layout(Layout())
    assert (packed.fingerprint, packed.records_fingerprint) == ("ab12", "cd34")
    assert (packed.block_tokens, packed.max_rollback) == (128, 8)
    assert [(g.name, g.kind) for g in packed.groups] == [
        ("csa", pb.CACHE_GROUP_KIND_GLOBAL),
        ("window", pb.CACHE_GROUP_KIND_WINDOW),
    ]
    group = packed.groups[0]
    assert (group.layers, group.entries, group.tokens_per_entry, group.record_bytes) == (3, 32, 4, 512)
    assert (group.dtype, group.record_version) == ("float32", "v4.csa.float32.1")


def test_only_a_layout_that_replays_says_so():
    assert not wire.pack_layout(Layout()).HasField("replay")
    policy = wire.pack_layout(Layout(replay=Replay(128, decoder=True))).replay
    assert (policy.tokens, policy.decoder, policy.handoff, policy.stacked) == (128, True, False, False)
    assert wire.pack_layout(Layout(replay=Replay(1024, stacked=True))).replay.stacked


def test_an_unknown_kind_of_group_is_no_silent_default():
    with pytest.raises(KeyError):
        wire.pack_layout(Layout(groups=(Group("x", "other"),)))
