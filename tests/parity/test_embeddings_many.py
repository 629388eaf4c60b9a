"""Vectors of 200 texts of 1 to 500 tokens equal transformers' last rows, for each architecture, with chunks, preemption
and prefix caching, from folders with a head and as `AutoModel` saves them."""

from pathlib import Path

import pytest
from octavo_testing.embedders import (
    cosines,
    draw_texts,
    embed_under_pressure,
    make_embedder,
    pooled_rows,
    preemption_every,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("with_head", "caching"), [(True, True), (False, False)], ids=["causal cached", "bare"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral"])
def test_vectors_of_many_texts(tmp_path: Path, name: str, with_head: bool, caching: bool) -> None:
    folder, texts = make_embedder(name, tmp_path, with_head=with_head), draw_texts(200, longest=500)
    runner = "pooling" if with_head else "auto"
    with preemption_every(7):  # 6 steps of 96 tokens compute a text that is alone
        vectors, stats = embed_under_pressure(folder, texts, runner=runner, enable_prefix_caching=caching)
    assert cosines(vectors, pooled_rows(folder, texts)).min() >= 0.99999
    assert stats.preemptions > 5
    assert (stats.prefix_cache_hits > 0) == caching
