"""The GPU handoff's payload is V4.1's, as the CPU's is, and each of its bytes has one place on either side."""

from __future__ import annotations

import numpy as np
import pytest

from bench.handoff import V41_BLOCK

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")

from bench.handoff_gpu import BLOCK_BYTES, BLOCK_EXTENTS, BLOCK_TOKENS, Payload, main


def test_block_is_that_of_the_cpu_handoff_and_of_890_bytes_a_token() -> None:
    assert BLOCK_EXTENTS == V41_BLOCK
    assert BLOCK_BYTES == 890 * BLOCK_TOKENS


def test_extents_fill_the_slab_and_share_no_byte_of_the_pool() -> None:
    payload = Payload(blocks=9, seed=3)
    slab, pool, sizes = payload.places()
    for starts, memory_bytes, taken in ((slab, payload.nbytes, 1), (pool, 2 * payload.nbytes, 0.5)):
        used = np.zeros(memory_bytes, np.uint8)
        for start, size in zip(starts, sizes, strict=True):
            used[start : start + size] += 1
        assert used.max() == 1
        assert used.mean() == taken


def test_both_sides_scatter_by_tables_of_their_own() -> None:
    assert not np.array_equal(Payload(64, seed=1).table, Payload(64, seed=2).table)


def test_without_a_gpu_the_command_says_so_and_what_runs_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu is a dry run" in capsys.readouterr().err
