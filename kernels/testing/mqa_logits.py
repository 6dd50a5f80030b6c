"""Operands of index scores, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference.mqa_logits import WIDTH, IndexKeys, MqaOperands, mqa_logits, paged_keys, tokens_of_a_sequence

# |found - expected| / |expected|: Hopper's FP8 products keep 14 bits of a sum of 128.
RELATIVE = 5e-4
POISON_PAGE = 2_147_480_000
_POISON_CODE, _UNTOUCHED = 0x7F, -12345.0  # NaN in e4m3; what lies in the output before a run


def make_ragged(tokens: int, keys: int, heads: int, device: torch.device, seed: int) -> MqaOperands:
    """The last `tokens` of `keys` positions: each sees the keys up to its own."""
    draw = torch.Generator(device).manual_seed(seed)
    values, scales = _keys(keys, device, draw)
    ends = torch.arange(keys - tokens + 1, keys + 1, device=device).clamp(min=0).int()
    return MqaOperands(*_queries(tokens, heads, device, draw), IndexKeys(values[None], scales[None]), ends)


def make_paged(
    lengths: Tensor, tokens: int, heads: int, page_tokens: int, device: torch.device, seed: int, pages: int = 0
) -> tuple[MqaOperands, int]:
    """`tokens` queries for each length of keys in scattered pages, and the columns; where nothing is, there is NaN.

    Of `tokens` queries the last sees the whole length, the one before it one key less. `pages`: as many in all, shared
    at random (then no slot is poisoned).
    """
    draw = torch.Generator(device).manual_seed(seed)
    most = max(int(lengths.max()), 1)
    width = -(-most // page_tokens)
    need = -(-lengths // page_tokens)
    count = pages or int(need.sum()) + 1
    records = _records(count, page_tokens, device, draw)
    table = torch.full((len(lengths), width), POISON_PAGE, dtype=torch.int32, device=device)
    order = torch.randperm(count, generator=draw, device=device).int()
    at = 0
    for s, n in enumerate(need.tolist()):
        if pages:
            table[s, :n] = torch.randint(0, count, (n,), generator=draw, device=device, dtype=torch.int32)
        else:
            table[s, :n] = order[at : at + n]
            at += n
    keys = paged_keys(records, page_tokens, table)
    if not pages:
        _poison(keys, table, lengths)
    ends = (lengths.to(device)[:, None] - torch.arange(tokens - 1, -1, -1, device=device)).clamp(min=0).flatten().int()
    given = MqaOperands(*_queries(len(lengths) * tokens, heads, device, draw), keys, ends)
    return given, width * page_tokens


def make_hostile(given: MqaOperands) -> MqaOperands:
    """Weights of zero, of one size and infinite, tokens that see nothing, scales and keys that are no numbers."""
    weights, ends = given.weights.clone(), given.ends.clone()
    weights[::5] = 0
    weights[1::7] = 1
    weights[2::9] *= -1
    ends[::11] = 0
    values, scales = given.keys.values, given.keys.scales
    values.view(torch.uint8)[:, 3::17, 5] = _POISON_CODE
    scales[:, 4::19], scales[:, 5::23] = torch.nan, torch.inf
    scales[:, 6::29] = 0
    return replace(given, weights=weights, ends=ends)


def few_of(given: MqaOperands, most: int) -> tuple[MqaOperands, Tensor]:
    """At most that many of the sequences, or of the tokens of the one, and the numbers of their tokens."""
    each = tokens_of_a_sequence(given)
    table = given.keys.table
    units = len(given.ends) if table is None else len(table)
    chosen = torch.linspace(0, units - 1, min(units, most), device=given.ends.device).long()
    tokens = chosen if table is None else (chosen[:, None] * each + torch.arange(each, device=chosen.device)).flatten()
    starts = None if given.starts is None else given.starts[tokens]
    keys = given.keys if table is None else replace(given.keys, table=table[chosen])
    few = MqaOperands(given.queries.view(torch.uint8)[tokens].view(torch.float8_e4m3fn), given.weights[tokens], keys,
                      given.ends[tokens], starts)  # fmt: skip
    return few, tokens


def assert_logits(
    given: MqaOperands, columns: int, run: Callable[[MqaOperands, Tensor], None], most: int = 16
) -> float:
    """Runs twice into poisoned memory and compares with float64. Returns the relative error; AssertionError beyond."""
    found, again = (torch.full((len(given.ends), columns), _UNTOUCHED, device=given.ends.device) for _ in range(2))
    run(given, found)
    run(given, again)
    if not torch.equal(found.view(torch.int32), again.view(torch.int32)):
        raise AssertionError("a repeated call gave other bits")
    few, tokens = few_of(given, most)
    rows = found[tokens]
    expected = mqa_logits(few, columns, torch.float64)
    seen = _seen(few, columns)
    if bool((rows[~seen] != _UNTOUCHED).any()):
        raise AssertionError("a score was written that its token does not see")
    return assert_close(rows[seen], expected[seen])


def assert_close(found: Tensor, expected: Tensor) -> float:
    """Relative error of scores against float64. AssertionError where it is too large, or infinities and NaN differ."""
    for name, of in (("NaN", torch.isnan), ("infinity", torch.isinf)):  # of either sign, where a sum is nearly zero
        if not torch.equal(of(found), of(expected)):
            raise AssertionError(f"{name} in {int((of(found) != of(expected)).sum())} other places")
    finite = expected.isfinite()
    difference, size = found[finite].double() - expected[finite], float(expected[finite].norm())
    error = float(difference.norm()) / (size or 1.0)
    root = size / max(int(finite.sum()), 1) ** 0.5
    worst = float(difference.abs().max()) if difference.numel() else 0.0
    if not error <= RELATIVE or worst > 20 * RELATIVE * max(root, 1e-9):
        raise AssertionError(f"scores are off by {error:.3g}, the worst by {worst:.3g}")
    return error


def _seen(given: MqaOperands, columns: int) -> Tensor:
    place = torch.arange(columns, device=given.ends.device)
    seen = place < given.ends[:, None]
    return seen if given.starts is None else seen & (place >= given.starts[:, None])


def _queries(tokens: int, heads: int, device: torch.device, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    queries = torch.randn(tokens, heads, WIDTH, generator=draw, device=device).to(torch.float8_e4m3fn)
    return queries, torch.randn(tokens, heads, generator=draw, device=device) / heads**0.5


def _keys(count: int, device: torch.device, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    values = (torch.randn(count, WIDTH, generator=draw, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, torch.rand(count, generator=draw, device=device) / 100 + 0.005


def _records(pages: int, page_tokens: int, device: torch.device, draw: torch.Generator) -> Tensor:
    """uint8 [pages, bytes], a multiple of 16."""
    records = torch.zeros(pages, -(-page_tokens * (WIDTH + 4) // 16) * 16, dtype=torch.uint8, device=device)
    for first in range(0, pages, 8192):  # a part at a time: fp32 copies are large
        part = records[first : first + 8192]
        values, scales = _keys(len(part) * page_tokens, device, draw)
        keys = paged_keys(part, page_tokens, torch.zeros(1, 1))
        keys.values.view(torch.uint8).copy_(values.view(torch.uint8).view(keys.values.shape))
        keys.scales.copy_(scales.view(keys.scales.shape))
    return records


def _poison(keys: IndexKeys, table: Tensor, lengths: Tensor) -> None:
    """NaN in the slots behind a length and in pages of no sequence."""
    page_tokens = keys.values.shape[1]
    used = torch.zeros(keys.values.shape[:2], dtype=torch.bool, device=keys.values.device)
    for s, length in enumerate(lengths.tolist()):
        place = torch.arange(length, device=used.device)
        used[table[s].long()[place // page_tokens], place % page_tokens] = True
    keys.values.view(torch.uint8)[~used] = _POISON_CODE
    keys.scales[~used] = torch.nan
