"""Batches laid into a graph's operands: what is behind the live rows is nobody's, whatever stood there before."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.graphs import has_room, holds, lay, mapped, move_on, nobody, sizes_of
from kernels.operands import CPU, Ragged, Windows
from kernels.staging import flat, on_device, staged, views


def decode_rows(contexts: list[int], blocks: int) -> Ragged:
    count, at = len(contexts), np.array(contexts, np.int32)
    done = np.flatnonzero((at + 1) % 4 == 0).astype(np.int32)
    return Ragged(
        tokens=at.astype(np.int64) + 100,
        positions=at,
        sequences=np.arange(count, dtype=np.int32),
        starts=np.arange(count + 1, dtype=np.int32),
        context=at,
        slots=np.arange(count, dtype=np.int32) + 7,
        tables=np.arange(count * blocks, dtype=np.int32).reshape(count, blocks) + 1,
        windows={4: Windows(done, at[done] // 4)},
    )


def test_sizes_are_powers_of_two_and_the_most() -> None:
    assert sizes_of(1) == [1]
    assert sizes_of(16) == [1, 2, 4, 8, 16]
    assert sizes_of(20) == [1, 2, 4, 8, 16, 20]


def test_a_batch_stands_first_and_nobody_behind_it() -> None:
    shape = nobody(4, 6, {4: Windows(np.zeros(0, np.int32), np.zeros(0, np.int32))})
    plan = mapped(torch.from_numpy(flat(shape)), shape)
    lay(decode_rows([3, 8, 11, 15], 5), plan)
    lay(decode_rows([7, 9], 2), plan)
    assert plan.positions.tolist() == [7, 9, -1, -1] and plan.slots.tolist() == [7, 8, -1, -1]
    assert plan.tokens.tolist() == [107, 109, 0, 0] and plan.context.tolist() == [7, 9, 0, 0]
    assert plan.tables[:2, :2].tolist() == [[1, 2], [3, 4]]
    assert plan.windows[4].sequence.tolist() == [0, -1, -1, -1] and plan.windows[4].window[0] == 1
    assert plan.starts.tolist() == [0, 1, 2, 3, 4]


def test_one_buffer_holds_every_array_at_multiples_of_sixteen_bytes() -> None:
    rows = decode_rows([3, 8, 11], 3)
    found = views(torch.from_numpy(flat(rows)), rows)
    for name in ("tokens", "positions", "sequences", "starts", "context", "slots", "tables"):
        part = getattr(found, name)
        assert torch.equal(part, torch.from_numpy(getattr(rows, name).astype(np.int32))), name
        assert part.storage_offset() % 4 == 0
    assert found.windows[4][0].tolist() == [0, 2] and found.floors.tolist() == [0, 0, 0]


def test_a_batch_is_staged_once_and_a_changed_copy_anew() -> None:
    rows = decode_rows([3, 8], 3)
    assert staged(rows, CPU) is staged(rows, CPU)
    other = dataclasses.replace(rows, positions=rows.positions + 1)
    assert staged(other, CPU).positions.tolist() == [4, 9]
    assert on_device(rows.positions, CPU).data_ptr() == rows.positions.ctypes.data


def laid(contexts: list[int], size: int = 4) -> Ragged:
    shape = nobody(size, 6, {})
    plan = mapped(torch.from_numpy(flat(shape)), shape)
    lay(dataclasses.replace(decode_rows(contexts, 5), windows={}), plan)
    return plan


def following(contexts: list[int], tokens: list[int]) -> Ragged:
    rows = decode_rows([context + 1 for context in contexts], 5)
    return dataclasses.replace(rows, tokens=np.array(tokens, np.int64), windows={})


def test_a_plan_moved_on_is_the_next_step_and_no_other() -> None:
    plan = laid([3, 8])
    move_on(plan, np.array([11, 12, 99, 99]))
    step = following([3, 8], [11, 12])
    assert holds(plan, step)
    assert plan.tokens.tolist() == [11, 12, 0, 0] and plan.positions.tolist() == [4, 9, -1, -1]
    assert not holds(plan, following([3, 8], [11, 13])), "another token"
    assert not holds(plan, following([3, 9], [11, 12])), "another position"
    assert not holds(plan, following([3], [11])), "one sequence has ended"
    assert not holds(plan, dataclasses.replace(step, tables=step.tables + 1)), "other blocks"
    assert not holds(plan, dataclasses.replace(step, slots=step.slots + 1)), "another slot"
    assert not holds(plan, dataclasses.replace(step, floors=np.ones(2, np.int32))), "a window ends earlier"


def test_the_next_step_has_room_while_each_sequence_has_a_place_behind_this_ones() -> None:
    def batch(*contexts: int) -> RaggedBatch:
        count, none = len(contexts), np.zeros(len(contexts), np.int64)
        tables = tuple((0,) * (context // 16 + 1) for context in contexts)
        return RaggedBatch(none, none, np.arange(count + 1), np.array(contexts, np.int32), tables, none, none)

    assert has_room(batch(0, 14, 16), 16)
    assert not has_room(batch(0, 15), 16)
