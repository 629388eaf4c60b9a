"""Weights and KV cache that a sleeping executor has given back and restores."""

from pathlib import Path

import pytest
from octavo_engine.runner import engine_memory
from octavo_engine.runner.drafter import DraftCache, Drafter
from octavo_engine.runner.executor import Executor
from octavo_engine.runner.graphed_model import GraphedModel
from octavo_engine.runner.load import load
from octavo_engine.runner.runner import Runner
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import LoRAModule, SpeculativeConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import MemoryTag
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import make_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path)


@pytest.fixture
def executor(folder: Path) -> Executor:
    sizes = {"num_threads": 1, "num_gpu_blocks_override": 20, "swap_space": 0.001}
    return load(EngineConfig(model=str(folder), dtype="float32", **sizes))[0]


def next_token(executor: Executor, seq_id: int, **fields: float) -> int:
    params = SamplingParams(temperature=0, **fields)
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


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_counts_of_penalised_tokens_are_freed_and_counted_again(folder: Path, tag: MemoryTag) -> None:
    """The sequence after the sleep is in the slot of the one before it, with equal tokens."""
    config = EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=20, async_scheduling=True)
    executor = load(config)[0]
    counts = executor._memory._runner._sampler._counts
    expected = next_token(executor, 0, repetition_penalty=1.5)
    assert counts._counts is not None
    executor.release(tag)
    assert counts._counts is None
    executor.restore(tag)
    assert next_token(executor, 1, repetition_penalty=1.5) == expected
    assert (counts._counts != 0).sum() == 3


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


def held(executor: Executor) -> list[bool]:
    """Return which parts of the memory are held: model, that of the adapters, draft model; both caches and hosts."""
    memory, adapters = executor._memory, executor._adapters
    runner, drafter = memory._runner, memory._drafter
    weights = [runner.model.model, adapters._model, drafter.model.model]
    caches = [memory._backend.cache.keys, runner.host, drafter.cache.backend.cache.keys, drafter.cache._host]
    return [part is not None and len(part) > 0 if isinstance(part, list) else part is not None
            for part in (*weights, *caches)]  # fmt: skip


#: Released parts, the part whose restoration fails, and the method that fails.
FAILURES: list[tuple[list[MemoryTag], MemoryTag, type, str]] = [
    (["weights"], "weights", Drafter, "reload_model"),
    (["weights"], "weights", Runner, "capture_graphs"),
    (["kv_cache"], "kv_cache", DraftCache, "allocate"),
    (["kv_cache"], "kv_cache", Runner, "capture_graphs"),
    (["weights", "kv_cache"], "weights", Drafter, "reload_model"),
]


def test_a_part_that_fails_leaves_the_memory_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_memory, "return_freed_memory", lambda: None)  # it takes most of the time
    adapter = write_adapter(tmp_path / "adapter", llama_pairs(seed=1))
    drafts = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=2)
    config = EngineConfig(
        model=str(folder), dtype="float32", num_gpu_blocks_override=20, swap_space=0.001, speculative_config=drafts,
        enable_lora=True, lora_modules=(LoRAModule(name="a", path=str(adapter)),),
    )  # fmt: skip
    executor = load(config)[0]
    expected = next_token(executor, 0)
    for number, (released, restored, owner, method) in enumerate(FAILURES, 1):
        for tag in released:
            executor.release(tag)
        before = held(executor)
        with monkeypatch.context() as failing:
            failing.setattr(owner, method, _raise_no_room)
            with pytest.raises(RuntimeError, match="no room"):
                executor.restore(restored)
        assert held(executor) == before, method
        for tag in released:
            executor.restore(tag)
        assert all(held(executor))
        assert next_token(executor, number) == expected


def _raise_no_room(*_: object) -> None:
    raise RuntimeError("no room")
