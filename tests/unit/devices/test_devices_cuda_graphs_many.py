"""300 random runs of decodes, and of prompts, chunks, drafts and decodes: graphs' stand-in gives the logits of eager
steps, bit for bit."""

from pathlib import Path

import pytest
from octavo_testing.decode_pairs import GraphedDevice, Pair, make_long_tiny

pytestmark = pytest.mark.slow

MODELS = ("qwen3", "gemma2", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_long_tiny(name, tmp_path_factory.mktemp("models"), max_model_len=90) for name in MODELS}


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_graphs_equal_eager_steps(folders: dict[str, Path], first: int) -> None:
    folder = folders[MODELS[first // 10 % len(MODELS)]]
    pair = Pair.open(folder, device=GraphedDevice, dtype="float32", max_num_seqs=12)
    for seed in range(first, first + 10):
        pair.run_randomly(10, seed=seed)
        pair.mix_randomly(10, seed=seed)
