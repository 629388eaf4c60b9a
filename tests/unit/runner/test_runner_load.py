"""Loading a model: errors before any computation, and dummy weights."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.tiny_models import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(folder), "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 20, **fields}
    )


def test_lengths_come_from_the_model_or_the_user(folder: Path) -> None:
    assert load(config(folder))[1].max_model_len == 128
    assert load(config(folder, max_model_len=50))[1].max_model_len == 50
    assert load(config(folder, num_gpu_blocks_override=7))[1].max_model_len == 112


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 129}, "at most 128"),
        ({"max_model_len": 0}, "at least 1"),
        ({"num_gpu_blocks_override": 7, "max_model_len": 128}, "--max-model-len to at most 112"),
        ({"device": "cuda"}, "--device cuda"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
    ids=str,
)
def test_an_unusable_model_is_refused_in_one_line(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as failure:
        load(config(folder, **fields))
    assert "\n" not in str(failure.value)


def test_dummy_weights_run(folder: Path) -> None:
    executor, info = load(config(folder, load_format="dummy"))
    new = NewSeq(seq_id=0, token_ids=[3, 4, 5], num_prompt_tokens=3, params=SamplingParams())
    step = SeqStep(seq_id=0, start=0, num_tokens=3, sample=True, block_ids=[[1]])
    result = executor.submit(StepPlan(step_id=0, new_seqs=[new], seqs=[step])).result()
    assert result.error is None
    assert len(result.seqs[0].token_ids) == 1
    assert info.weights_fingerprint != load(config(folder))[1].weights_fingerprint


def test_loading_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """Its import takes over a second of each start."""
    folders = [str(make_tiny(name, tmp_path)) for name in ("llama", "gpt2", "gemma3")]
    code = f"""
import sys
from octavo_engine.settings.config import EngineConfig
from octavo_engine.runner.load import load
for folder in {folders!r}:
    load(EngineConfig(model=folder, num_gpu_blocks_override=20, dtype="float32"))
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]"


def test_the_commit_of_a_hub_model_is_reported(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "c1"
    shutil.copytree(folder, snapshot)
    assert load(config(snapshot))[1].revision == "c1"
    assert load(config(folder))[1].revision == ""


def test_progress_is_reported(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(config(folder), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] > 0.9 * seen[-1][1] > 0


def test_two_executors_in_one_process_are_independent(folder: Path) -> None:
    """Each executor has its own weights and cache; there are no globals."""
    plan = StepPlan(
        step_id=0,
        new_seqs=[NewSeq(seq_id=0, token_ids=[3], num_prompt_tokens=1, params=SamplingParams(temperature=0.0))],
        seqs=[SeqStep(seq_id=0, start=0, num_tokens=1, sample=True, block_ids=[[1]])],
    )
    first, second = (load(config(folder))[0] for _ in range(2))
    want = first.submit(plan).result().seqs[0].token_ids
    first.shutdown()
    assert second.submit(plan).result().seqs[0].token_ids == want
