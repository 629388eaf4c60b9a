"""The sampling kernel against its torch form on many rows of real vocabularies."""

from collections.abc import Iterator

import pytest
from octavo_testing.draw_cases import FILTERS, draw_params, near_ties, random_logits

pytestmark = pytest.mark.slow

MOST_NEAR_TIES = 1e-4  # share of the rows


def batches(rows: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, size):
        yield start, min(size, rows - start)


@pytest.mark.parametrize(
    ("vocab", "rows", "size"), [(1024, 100_000, 2000), (49_152, 10_000, 100), (151_936, 2000, 40)], ids=str
)
def test_kernel_equals_torch_on_many_rows(vocab: int, rows: int, size: int) -> None:
    """Rows are peaked, as those of trained models, to nearly flat; each batch uses the next of the filters."""
    differing, filters, scales = 0, list(FILTERS.values()), (0.1, 1.0, 2.0, 4.0)
    for i, (start, count) in enumerate(batches(rows, size)):
        logits = random_logits(count, vocab, seed=start, scale=scales[i % len(scales)])
        differing += near_ties(logits, draw_params(count, vocab, seed=start, **filters[i % len(filters)]))
    assert differing <= MOST_NEAR_TIES * rows
