"""Counter-based random numbers."""

import numpy as np

from engine.sampling.random import philox, uniforms


def test_philox_gives_the_published_words() -> None:
    """Known answers of the Random123 distribution, philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    counters = np.array([[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], dtype=np.uint64)
    keys = np.array([[0, 0], [ones, ones], [0xA4093822, 0x299F31D0]], dtype=np.uint64)
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox(counters, keys).tolist() == expected


def test_a_draw_depends_only_on_its_seed_and_number() -> None:
    alone = [uniforms([seed], [draw])[0] for seed, draw in ((1, 0), (1, 1), (2**64 - 1, 2**40))]
    assert uniforms([1, 1, 2**64 - 1], [0, 1, 2**40]).tolist() == alone
    assert len(set(alone)) == 3


def test_draws_are_uniform() -> None:
    points = uniforms([7] * 20_000, list(range(20_000)))
    counts, _ = np.histogram(points, bins=20, range=(0.0, 1.0))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert points.min() >= 0.0 and points.max() < 1.0
