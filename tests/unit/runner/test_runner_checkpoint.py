"""A draft model that does not suit is refused with the value, the limit and the remedy; its memory is planned."""

import json
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.devices.device import CpuDevice
from octavo_engine.runner.capacity import capacity_of
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import byte_tokenizer, make_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("draft"))


def plan(target: Path, draft: Path | None, *, device: CpuDevice | None = None, **settings: Any) -> Any:
    speculation = (
        None if draft is None else SpeculativeConfig(num_speculative_tokens=3, method="draft_model", model=str(draft))
    )
    config = EngineConfig(model=str(target), dtype="float32", speculative_config=speculation, **settings)
    return capacity_of(config, device or CpuDevice(), resolve_files(config))


def test_weights_and_blocks_of_both_models_are_planned(target: Path, draft: Path) -> None:
    sizes = {"kv_cache_memory_bytes": 1 << 20, "swap_space": 0.001}
    alone, other, both = plan(target, None, **sizes), plan(draft, None, **sizes), plan(target, draft, **sizes)
    assert both.weights_bytes == alone.weights_bytes + other.weights_bytes
    assert both.bytes_per_block == alone.bytes_per_block + other.bytes_per_block
    assert both.num_blocks == (1 << 20) // both.bytes_per_block < alone.num_blocks
    assert both.num_host_blocks == int(0.001 * (1 << 30)) // both.bytes_per_block
    assert plan(target, draft, num_gpu_blocks_override=9).num_blocks == 9


def copied(draft: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    for file in draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"max_position_embeddings": 100}, {}, "context of 100 tokens, .* 128: set --max-model-len to at most 100, or"),
        ({"max_position_embeddings": 64}, {"max_model_len": 65}, "64 tokens, .* 65: set --max-model-len to at most 64"),
        ({"vocab_size": 300}, {}, "vocabulary of 300 tokens, .* has 259: use a draft model of the target's family"),
        ({"architectures": ["NoneForCausalLM"], "model_type": "none"}, {"model_impl": "octavo"}, "NoneForCausalLM"),
    ],
    ids=["context", "shorter-requests", "vocab-size", "architecture"],
)
def test_unsuitable_draft_models_are_refused(
    target: Path, draft: Path, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    folder = copied(draft, tmp_path / "changed", **changes)
    with pytest.raises(StartupError, match=message):
        plan(target, folder, **settings)


def test_a_shorter_context_suits_shorter_requests(target: Path, draft: Path, tmp_path: Path) -> None:
    folder = copied(draft, tmp_path / "changed", max_position_embeddings=64)
    assert plan(target, folder, max_model_len=64).max_model_len == 64


def test_another_tokenizer_of_the_same_size_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    folder = copied(draft, tmp_path / "changed")
    ids = json.loads(byte_tokenizer().to_str())
    vocab = ids["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(ids))
    with pytest.raises(StartupError, match=r"does not have the vocabulary of .* model of the target's family"):
        plan(target, folder)


def test_a_draft_model_without_a_tokenizer_is_judged_by_its_size(target: Path, draft: Path, tmp_path: Path) -> None:
    folder = copied(draft, tmp_path / "changed")
    (folder / "tokenizer.json").unlink()
    assert plan(target, folder).num_blocks


def test_an_absent_draft_model_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="absent"):
        plan(target, tmp_path / "absent")


def test_other_devices_are_refused(target: Path, draft: Path) -> None:
    class Gpu(CpuDevice):
        def __init__(self) -> None:
            super().__init__()
            self.name = "cuda"

    with pytest.raises(StartupError, match=r"CPU only, .* on cuda: set --device cpu, or method='ngram'"):
        plan(target, draft, device=Gpu())
