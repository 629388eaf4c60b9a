"""The Triton kernels of experts, in the interpreter: all numbers of rows, whole models, and graphs of one."""

from pathlib import Path

import pytest
import torch
from octavo_engine.layers.moe import Experts
from octavo_engine.models.registry import build_model
from octavo_engine.ops import triton_devices
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.triton.expert_linear import TILES
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.decode_pairs import Pair
from octavo_testing.expert_cases import ExpertCase
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, expected_logits, max_distance
from octavo_testing.tiny_models import LENGTH, make_tiny
from octavo_testing.triton_device import TritonGraphs, triton_kernels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", range(1, 38))
def test_experts_of_any_number_of_rows_equal_the_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})
    case = ExpertCase.make(rows, 1 + rows % 8, experts=9)
    assert max(map(case.error, TILES)) <= 1e-5


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    files, (tokens, expected) = resolve_model(str(folder)), expected_logits(folder)
    with triton_kernels():
        model = build_model(load_model_config(files), dtype=torch.float32, device="cpu", max_model_len=LENGTH)
        model.load_weights(iter_weights(files))
        model.finish_loading()
        assert all(each.stacks for each in model.modules() if isinstance(each, Experts))
        backend = CudaBackend(model.kv_specs(), BLOCK, torch.float32, "cpu", num_programs=5)
        driver = PagedDriver(model, block_size=BLOCK, backend=backend)
        assert max_distance(driver, tokens, expected, FEEDS["chunks_at_block_edges"]) <= 1e-4


def test_a_graph_of_a_model_with_experts_equals_eager_steps(tmp_path: Path) -> None:
    """The stand-in's replays run the model's code, also for tokens of padding, which have experts, too."""
    folder = make_tiny("olmoe", tmp_path)
    with triton_kernels():
        pair = Pair.open(folder, device=TritonGraphs, dtype="float32", max_num_seqs=4)
        before = pair.recorded.model.forwards
        for seq in range(3):
            pair.add(seq, list(range(5 + seq, 9 + 2 * seq)))
        pair.decode([0, 1, 2])
        pair.decode([1])
        assert pair.recorded.device.graphed is not None
        assert set(pair.recorded.device.graphed._graphs) == set(TritonGraphs.buckets)
        assert pair.recorded.model.forwards == before + 5
