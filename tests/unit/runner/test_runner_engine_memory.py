"""Weights and KV cache that a sleeping executor has given back and restores."""

from pathlib import Path

import pytest
from octavo_engine.runner.executor import Executor
from octavo_engine.runner.graphed_model import GraphedModel
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.tiny_models import make_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path)


@pytest.fixture
def executor(folder: Path) -> Executor:
    sizes = {"num_threads": 1, "num_gpu_blocks_override": 20, "swap_space": 0.001}
    return load(EngineConfig(model=str(folder), dtype="float32", **sizes))[0]


def next_token(executor: Executor, seq_id: int) -> int:
    params = SamplingParams(temperature=0)
    new = NewSeq(seq_id=seq_id, token_ids=[3, 4, 5], num_prompt_tokens=3, params=params)
    step = SeqStep(seq_id=seq_id, start=0, num_tokens=3, sample=True, block_ids=[[1]])
    dropped = [seq_id - 1] if seq_id else []
    result = executor.submit(StepPlan(step_id=seq_id, new_seqs=[new], seqs=[step], dropped_seqs=dropped)).result()
    assert result.error is None
    return result.seqs[0].token_ids[0]


def test_restored_memory_gives_equal_tokens(executor: Executor) -> None:
    expected = next_token(executor, 0)
    for seq_id, tags in enumerate((["kv_cache"], ["kv_cache", "weights"]), 1):
        for tag in tags:
            executor.release(tag)
        for tag in reversed(tags):
            executor.restore(tag)
        assert next_token(executor, seq_id) == expected


def test_a_plan_on_released_memory_fails_alone(executor: Executor) -> None:
    executor.release("weights")
    new = NewSeq(seq_id=7, token_ids=[3], num_prompt_tokens=1, params=SamplingParams())
    step = SeqStep(seq_id=7, start=0, num_tokens=1, sample=True, block_ids=[[1]])
    assert "released" in (executor.submit(StepPlan(step_id=0, new_seqs=[new], seqs=[step])).result().error or "")


def test_weights_are_restored_from_unchanged_files_only(executor: Executor, folder: Path) -> None:
    expected = next_token(executor, 0)
    executor.release("weights")
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StartupError, match="changed since the start"):
        executor.restore("weights")
    file.unlink()
    with pytest.raises(StartupError, match="cannot be read"):
        executor.restore("weights")
    file.write_bytes(content)
    executor.restore("weights")
    assert next_token(executor, 1) == expected


def test_the_release_of_the_kv_cache_frees_the_graphs_of_both_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[GraphedModel] = []
    monkeypatch.setattr(GraphedModel, "renew_graphs", lambda self: renewed.append(self))
    drafts = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=2)
    config = EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=20, speculative_config=drafts)
    executor = load(config)[0]
    draft, target = renewed
    executor.release("kv_cache")
    assert renewed[2:] == [target, draft]
