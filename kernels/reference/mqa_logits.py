"""Index scores of FP8 queries and keys, in torch. Knows no top-k.

score[token, key] = scale[key] * sum over heads of weight[token, head] * relu(query[token, head] . key), of the keys
from a token's start to before its end. Keys are 128 e4m3 channels with one fp32 scale, in pages; those of a sequence
lie in the pages of its table row. What scales the queries belongs to the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError

WIDTH = 128
HEADS = (16, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class IndexKeys:
    """values e4m3 [pages, page_tokens, 128], scales fp32 [pages, page_tokens]; table int32 [sequences, most pages], or
    None: all sequences see the one page."""

    values: Tensor
    scales: Tensor
    table: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MqaOperands:
    """queries e4m3 [tokens, heads, 128] and weights fp32 [tokens, heads], as many tokens for each sequence; starts
    (None: 0) and ends int32 [tokens] of the keys that a token sees, counted within its sequence."""

    queries: Tensor
    weights: Tensor
    keys: IndexKeys
    ends: Tensor
    starts: Tensor | None = None


def paged_keys(records: Tensor, page_tokens: int, table: Tensor) -> IndexKeys:
    """Keys of pages uint8 [pages, bytes] that hold all values of a page, then all its scales."""
    values = records[:, : page_tokens * WIDTH].view(torch.float8_e4m3fn).unflatten(1, (page_tokens, WIDTH))
    scales = records[:, page_tokens * WIDTH : page_tokens * (WIDTH + 4)].view(torch.float32)
    return IndexKeys(values, scales, table)


def mqa_logits(given: MqaOperands, columns: int, precision: torch.dtype = torch.float32) -> Tensor:
    """Scores [tokens, columns] in `precision`, -inf where a token does not see a key. Raises KernelError."""
    check_operands(given, columns)
    tokens, each = len(given.ends), tokens_of_a_sequence(given)
    found = torch.full((tokens, columns), -torch.inf, dtype=precision, device=given.ends.device)
    for token in range(tokens):
        first, last = visible(given, token, columns)
        if first >= last:
            continue
        values, scales = _keys(given.keys, token // each, first, last)
        products = given.queries[token].to(precision) @ values.to(precision).T
        found[token, first:last] = given.weights[token].to(precision) @ products.relu() * scales.to(precision)
    return found


def visible(given: MqaOperands, token: int, columns: int) -> tuple[int, int]:
    """The first key that a token sees, and the one behind the last."""
    first = 0 if given.starts is None else max(int(given.starts[token]), 0)
    return first, min(int(given.ends[token]), columns)


def tokens_of_a_sequence(given: MqaOperands) -> int:
    return len(given.ends) // (1 if given.keys.table is None else max(len(given.keys.table), 1))


def check_operands(given: MqaOperands, columns: int) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    tokens, heads = given.queries.shape[:2]
    table = given.keys.table
    wanted = [("queries", given.queries, torch.float8_e4m3fn, (tokens, heads, WIDTH)),
              ("weights", given.weights, torch.float32, (tokens, heads)),
              ("ends", given.ends, torch.int32, (tokens,))]  # fmt: skip
    if given.starts is not None:
        wanted.append(("starts", given.starts, torch.int32, (tokens,)))
    if table is not None:
        wanted.append(("table", table, torch.int32, tuple(table.shape[:2])))
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")
    if heads not in HEADS:
        raise KernelError(f"there are {heads} heads", fix=f"pass one of {HEADS}")
    _check_keys(given.keys)
    if table is not None and (not len(table) or tokens % len(table)):
        raise KernelError(f"{tokens} tokens of {len(table)} sequences", fix="pass as many tokens for each sequence")
    room = given.keys.values.shape[1] * (1 if table is None else table.shape[1])
    if not 0 < columns <= room:
        raise KernelError(f"{columns} columns of {room} keys", fix=f"ask for 1 to {room}")


def _check_keys(keys: IndexKeys) -> None:
    values, scales = keys.values, keys.scales
    fitting = values.dtype == torch.float8_e4m3fn and values.shape[2:] == (WIDTH,) and values.stride()[1:] == (WIDTH, 1)
    if not fitting or values.stride(0) % 16 or values.data_ptr() % 16:
        found = f"{values.dtype} {list(values.shape)}, {list(values.stride())} apart"
        raise KernelError(f"values is {found}", fix="pass e4m3 [pages, page_tokens, 128] at multiples of 16 bytes")
    if scales.dtype != torch.float32 or scales.shape != values.shape[:2] or scales.stride(1) != 1:
        shape = list(values.shape[:2])
        raise KernelError(
            f"scales is {scales.dtype} {list(scales.shape)}", fix=f"pass fp32 {shape}, adjacent in a page"
        )
    if keys.table is None and len(values) != 1:
        raise KernelError(f"{len(values)} pages and no table", fix="pass a table, or all keys as one page")
    if keys.table is not None and (scales.stride(0) % 4 or scales.data_ptr() % 16) and values.shape[1] % 64 == 0:
        raise KernelError(f"scales of pages are {scales.stride(0)} apart", fix="pass them at multiples of 16 bytes")


def _keys(keys: IndexKeys, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Values [keys, 128] and scales [keys] of a sequence's keys from `first` to before `last`."""
    if keys.table is None:
        return keys.values[0, first:last], keys.scales[0, first:last]
    page_tokens = keys.values.shape[1]
    place = torch.arange(first, last, device=keys.values.device)
    page, slot = keys.table[sequence].long()[place // page_tokens], place % page_tokens
    return keys.values.view(torch.uint8)[page, slot].view(torch.float8_e4m3fn), keys.scales[page, slot]
