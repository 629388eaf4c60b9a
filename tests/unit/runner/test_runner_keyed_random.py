"""The random generator of sampling, whose fixed definition lets a stream continue on another machine."""

import numpy as np
from octavo_engine.runner.keyed_random import uniforms

GOLDEN = [0.7262825984846085, 0.8461064032625754, 0.7947055478026693, 0.5601372079459457]


def at(seed: int, position: int) -> float:
    return float(uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0])


def test_the_definition_does_not_change() -> None:
    assert [at(0, 0), at(0, 1), at(1, 0), at(2**64 - 1, 100_000)] == GOLDEN


def test_uniform_over_positions_and_seeds() -> None:
    n = 20_000
    by_position = uniforms(np.full(n, 7, dtype=np.uint64), np.arange(n))
    by_seed = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 7))
    for values in (by_position, by_seed):
        counts, _ = np.histogram(values, bins=50, range=(0, 1))
        statistic = ((counts - n / 50) ** 2 / (n / 50)).sum()
        assert statistic < 49 + 4 * 98**0.5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert by_position.min() >= 0
    assert by_position.max() < 1
