"""The keys of sampling's noise; docs/reference/sampling.md publishes some (test_sampling_draws.py)."""

import numpy as np
from octavo_engine.sampling.draws import draw_keys, seed_keys


def test_keys_are_uniform_over_positions_and_seeds() -> None:
    n = 20_000
    by_position = draw_keys(seed_keys(np.full(n, 7, dtype=np.uint64)), np.arange(n))
    by_seed = draw_keys(seed_keys(np.arange(n, dtype=np.uint64)), np.full(n, 7))
    assert len(np.union1d(by_position, by_seed)) == 2 * n - 1, "they share seed 7, position 7"
    for keys in (by_position, by_seed):
        for half in (keys >> np.uint64(32), keys & np.uint64(2**32 - 1)):
            counts, _ = np.histogram(half, bins=50, range=(0, 2**32))
            statistic = ((counts - n / 50) ** 2 / (n / 50)).sum()
            assert statistic < 49 + 4 * 98**0.5
            assert abs(np.corrcoef(half[:-1].astype(float), half[1:].astype(float))[0, 1]) < 0.03
