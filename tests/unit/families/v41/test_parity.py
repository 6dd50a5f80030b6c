"""V4.1 equals the reference outputs, however the tokens are cut: logits, traces, quantized storage and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.families.v41.model import V41
from engine.families.v41.options import Options
from engine.layout import CacheGroup
from kernels.operands import Selection
from tests.support.replays import replaying, resumed_rows
from tests.support.tiny import Piece, batch_of, fresh_pool, run_in_chunks
from tests.unit.families.v41.material import DATA, Tensors, asking, larger, opened, tensors

BAR, QUANTIZED_BAR = 1e-3, 2e-2
LENGTHS = (1, 2, 5, 17, 33, 64, 90, 150)


@pytest.fixture(scope="module")
def tiny() -> V41:
    return opened(larger() / "v41-tiny")


@pytest.fixture(scope="module")
def logits() -> Tensors:
    return tensors(larger() / "v41-tiny-logits.safetensors")


@pytest.fixture(scope="module")
def replayed() -> Tensors:
    return tensors(larger() / "v41-replay.safetensors")


@pytest.mark.parametrize("length", [1, 5, 33, 90])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_published_storage_gives_the_reference_logits(length: int, kernels: str) -> None:
    """FP8 blocks of 32 x 32, packed FP4 experts and FP8 table rows, as upstream stores them."""
    reference = tensors(DATA / "tiny-q-logits.safetensors")
    family, tokens = opened(DATA / "tiny-q", kernels), reference[f"ids_{length}"].tolist()
    wanted = reference[f"logits0_{length}"]
    assert length == 1 or wanted.std() > 1, "a degenerate checkpoint would prove nothing"
    for chunk in (length, 1, 7, 16) if kernels == "cpu" else (length, 13):
        found = run_in_chunks(family, fresh_pool(family), tokens, chunk)
        assert (found - wanted).abs().max() <= BAR, f"chunks of {chunk}"


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_the_reference_for_every_chunking(length: int, tiny: V41, logits: Tensors) -> None:
    for chunk in (length, 1, 3, 7, 16, 64):
        found = run_in_chunks(tiny, fresh_pool(tiny), logits[f"ids_{length}"].tolist(), chunk)
        assert (found - logits[f"logits0_{length}"]).abs().max() <= BAR, f"chunks of {chunk}"


@pytest.mark.parametrize("length", [33, 90])
def test_the_reference_kernels_equal_the_reference_too(length: int, logits: Tensors) -> None:
    family = opened(larger() / "v41-tiny", "reference")
    found = run_in_chunks(family, fresh_pool(family), logits[f"ids_{length}"].tolist(), 31)
    assert (found - logits[f"logits0_{length}"]).abs().max() <= BAR


@pytest.mark.parametrize("length", [1, 2, 5, 33])  # of 17 rows the reference calls none stable
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_fake_quantized_caches_give_the_reference_logits(length: int, kernels: str, logits: Tensors) -> None:
    """Only rows whose reference survives small perturbations can be compared: one flipped code moves a selection."""
    family = opened(larger() / "v41-tiny", kernels, Options(fake_quantize=True))
    stable = logits[f"stable1_{length}"].bool()
    assert stable.any()
    for chunk in (length, 7):
        found = run_in_chunks(family, fresh_pool(family), logits[f"ids_{length}"].tolist(), chunk)
        assert (found - logits[f"logits1_{length}"])[stable].abs().max() <= QUANTIZED_BAR


def marked(selection: Selection, width: int, entries: int = 1) -> torch.Tensor:
    """A selection as bool [rows, width]; each number stands for `entries` of them."""
    chosen = torch.zeros(len(selection.counts), -(-width // entries), dtype=torch.bool)
    for row, count in enumerate(selection.counts.tolist()):
        chosen[row, selection.entries[row, :count].long()] = True
    return chosen.repeat_interleave(entries, 1)[:, :width]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def traced(request: pytest.FixtureRequest) -> tuple[V41, Tensors, dict[tuple[str, int], Any], Any]:
    """The model, the reference's trace, what the probe was told, and the pool afterwards."""
    family, reference = opened(larger() / "v41-tiny", request.param), tensors(larger() / "v41-tiny-trace.safetensors")
    told: dict[tuple[str, int], Any] = {}
    family.probe = lambda what, layer, value: told.__setitem__((what, layer), value)
    pool = fresh_pool(family)
    told["logits", -1] = run_in_chunks(family, pool, reference["ids"].tolist(), 64)
    return family, reference, told, pool


def test_streams_mixing_and_logits_equal_the_trace_in_every_layer(traced: tuple) -> None:
    _, reference, told, _ = traced
    for layer in range(12):
        assert (told["streams", layer] - reference[f"X_after_{layer}"]).abs().max() <= BAR
        assert (told["pre", layer] - reference[f"pre_after_{layer}"]).abs().max() <= BAR
    assert (told["logits", -1] - reference["logits"]).abs().max() <= BAR
    for layer in (9, 10, 11):  # what a draft model is fed with
        assert (told["entering", layer].mean(1) - reference[f"stream_mean_entering_{layer}"]).abs().max() <= BAR


def test_selections_and_candidates_equal_the_trace_exactly(traced: tuple) -> None:
    family, reference, told, _ = traced
    for layer in (2, 4, 6, 8, 10):
        wanted = reference[f"selected_{layer}"].bool()
        assert torch.equal(marked(told["shared", layer].selection, wanted.shape[1]), wanted), f"layer {layer}"
    wanted = reference["candidates"].bool()
    size = family.config.candidate_block_entries
    assert torch.equal(marked(told["shared", 11].candidates, 64, size), wanted)
    assert not wanted[-1].all(), "candidates must restrict something"


def test_entries_and_index_keys_equal_the_trace(traced: tuple) -> None:
    family, reference, _, pool = traced
    for layer in (2, 4, 6):
        role = family.config.schedule.roles[layer]
        for name, group in (("entries", f"entries_{role.ratio}"), ("index_keys", f"index_{role.ratio}")):
            found = global_records(pool, family.layout.group(group), role.place, 64)
            assert (found - reference[f"{name}_{layer}"]).abs().max() <= BAR


def test_engram_rows_equal_the_trace_exactly(traced: tuple) -> None:
    _, reference, told, _ = traced
    assert torch.equal(told["engram rows", -1], reference["engram_rows"])


def global_records(pool: Any, group: CacheGroup, layer: int, tokens: int) -> torch.Tensor:
    blocks = range(pool.layout.blocks_for(tokens))
    extents = [
        pool.block_extent(group.name, b).view("float32").reshape(group.layers, group.entries, -1) for b in blocks
    ]
    return torch.cat([torch.from_numpy(extent[layer].copy()) for extent in extents])[: tokens // group.tokens_per_entry]


HITS = [(40, 20), (40, 32), (90, 44), (90, 64), (90, 65), (150, 128)]


@pytest.mark.parametrize(("length", "hit"), HITS)
@pytest.mark.parametrize("chunk", [1000, 7])
def test_encoder_replay_equals_its_definition(length: int, hit: int, chunk: int, tiny: V41, replayed: Tensors) -> None:
    tokens, pool = replayed[f"ids_{length}"].tolist(), fresh_pool(tiny)
    run_in_chunks(tiny, pool, tokens, length)  # the entries of the hit; slot 0's windows stay unused
    before = pool.blocks.clone()
    found = resumed_rows(tiny, pool, tokens, hit, chunk)
    assert (found - replayed[f"encoder_{length}_{hit}"]).abs().max() <= BAR
    cached = hit // tiny.layout.block_tokens
    assert torch.equal(pool.blocks[:cached], before[:cached]), "blocks within the hit are never written again"


def trimmed_rows(family: V41, pool: Any, tokens: list[int], start: int, chunk: int, hit: int, slot: int) -> Any:
    """Logits of the last window, the only rows above the last entry source, computed `chunk` tokens at a time."""
    upper, blocks = len(tokens) - family.config.window, range(family.layout.blocks_for(len(tokens)))
    found = []
    for at in range(start, len(tokens), chunk):
        piece = Piece(tokens[at : at + chunk], at, blocks, slot)
        rows = range(max(0, upper - at), max(len(piece.tokens), upper - at))
        found.append(family.forward(replaying(asking(batch_of([piece]), rows), tokens, hit, upper), pool))
    return torch.cat(found)


@pytest.mark.parametrize("length", [40, 90, 150])
@pytest.mark.parametrize("chunk", [1000, 7, 32])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_decoder_replay_equals_its_definition(length: int, chunk: int, kernels: str, replayed: Tensors) -> None:
    family = opened(larger() / "v41-tiny", kernels)
    found = trimmed_rows(family, fresh_pool(family), replayed[f"ids_{length}"].tolist(), 0, chunk, 0, 0)
    assert (found - replayed[f"decoder_{length}"]).abs().max() <= BAR


@pytest.mark.parametrize(("length", "hit"), HITS)
@pytest.mark.parametrize("chunk", [1000, 7])
def test_both_replays_together_equal_their_definition(
    length: int, hit: int, chunk: int, tiny: V41, replayed: Tensors
) -> None:
    tokens, pool = replayed[f"ids_{length}"].tolist(), fresh_pool(tiny)
    run_in_chunks(tiny, pool, tokens, length)
    start = max(0, hit - tiny.config.window)
    found = trimmed_rows(tiny, pool, tokens, start, chunk, hit, 1)
    assert (found - replayed[f"both_{length}_{hit}"]).abs().max() <= BAR


def test_without_replay_the_same_rows_are_those_of_a_cold_run(tiny: V41, replayed: Tensors) -> None:
    for length in (40, 90, 150):
        found = run_in_chunks(tiny, fresh_pool(tiny), replayed[f"ids_{length}"].tolist(), 50)[-16:]
        assert (found - replayed[f"cold_{length}"]).abs().max() <= BAR
