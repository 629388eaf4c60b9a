"""Adapters of a tiny Llama: equal to a checkpoint into which they are merged; hashes, limits, and sleep."""

import os
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, InvalidRequest, LoRARequest, SamplingParams
from octavo_engine.sources import progress
from octavo_engine.wire.errors import StartupError, Unavailable
from octavo_testing.adapter_files import llama_pairs, write_adapter, write_merged
from octavo_testing.tiny_models import VOCAB, make_tiny
from safetensors.torch import load_file, save_file

PROMPTS = [{"prompt_token_ids": random.Random(i).choices(range(3, VOCAB), k=20 + i)} for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
Q = "model.layers.0.self_attn.q_proj"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks_override": 100,
    "block_size": 4,
    "num_threads": 1,
    "enable_sleep_mode": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), enable_lora=True, **SETTINGS)
    yield llm
    llm.shutdown()


def test_an_adapter_has_vllms_names() -> None:
    module = import_module("octavo_engine.lora.request")
    adapter = module.LoRARequest("name", 7, "/folder")
    assert isinstance(adapter, LoRARequest)
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("name", 7, "/folder")


def request(folder: Path) -> LoRARequest:
    return LoRARequest("name", 1, str(folder))


def tokens(llm: LLM, adapters: Any = None) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)]


def refusal(llm: LLM, folder: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        tokens(llm, request(folder))
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_beside_the_base_equal_merged_checkpoints(
    llm: LLM, model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    pairs = {n: (a.to(dtype), b.to(dtype)) for n, (a, b) in llama_pairs(seed=1).items()}
    adapter = write_adapter(tmp_path / "a", pairs, lora_alpha=4)
    merged = write_merged(
        model, tmp_path / "merged", {n: (a.float(), b.float()) for n, (a, b) in pairs.items()}, scale=0.5
    )
    alone = LLM(str(merged), **SETTINGS)
    expected, base = tokens(alone), tokens(llm)
    alone.shutdown()
    assert expected != base
    chosen = [request(adapter), None, request(adapter), None]
    assert tokens(llm, chosen) == [expected[0], base[1], expected[2], base[3]]


def test_equal_contents_share_blocks_and_others_do_not(model: Path, tmp_path: Path) -> None:
    llm = LLM(str(model), enable_lora=True, max_loras=2, **SETTINGS)
    folders = [
        write_adapter(tmp_path / name, llama_pairs(seed=seed), base_model_name_or_path=name)
        for name, seed in (("a", 1), ("copy", 1), ("b", 2))
    ]
    cached = [
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=None if folder is None else request(folder))[0]
        for folder in (None, *folders, folders[0])
    ]
    assert [output.num_cached_tokens for output in cached] == [0, 0, 19, 0, 19]
    llm.shutdown()


def test_adapters_that_left_the_memory_are_read_again(model: Path, tmp_path: Path) -> None:
    llm = LLM(str(model), enable_lora=True, max_loras=2, **SETTINGS)
    folders = [write_adapter(tmp_path / str(seed), llama_pairs(seed=seed)) for seed in range(4)]
    chosen = [request(folder) for folder in folders]
    first = tokens(llm, chosen)  # four adapters in one batch, of which two fit
    assert set(llm._core._executor._adapters._terms) == set(llm._core._adapters._in_memory)
    assert len(llm._core._adapters._in_memory) == 2
    assert first == [tokens(llm, each)[index] for index, each in enumerate(chosen)] == tokens(llm, chosen)
    llm.shutdown()


def test_a_start_keeps_the_first_adapters_in_memory(model: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(seed), llama_pairs(seed=seed)) for seed in (1, 1, 2, 3)]
    modules = [f"{index}={folder}" for index, folder in enumerate(folders)]
    llm = LLM(str(model), enable_lora=True, max_loras=1, max_cpu_loras=2, lora_modules=modules, **SETTINGS)
    in_memory = [llm.ready_info.adapters[name] for name in ("0", "2")]
    assert [*llm._core._executor._adapters._terms] == [*llm._core._adapters._in_memory] == in_memory
    llm.shutdown()


def test_an_adapter_of_another_model_or_rank_is_refused_and_changes_nothing(llm: LLM, tmp_path: Path) -> None:
    base, pairs = tokens(llm), llama_pairs("self_attn.q_proj")
    a, b = pairs[Q]
    wide = {Q: (torch.zeros(8, 128), b)}
    assert "(8, 128), the model needs (8, 64)" in refusal(llm, write_adapter(tmp_path / "1", pairs | wide))
    assert "the model needs (64, 8)" in refusal(llm, write_adapter(tmp_path / "2", pairs | {Q: (a, b[1:])}))
    large = refusal(llm, write_adapter(tmp_path / "3", llama_pairs(rank=17)))
    assert "rank 17; the limit is --max-lora-rank 16: raise it to at least 17" in large
    for name in ("model.layers.9.self_attn.q_proj", "lm_head", "model.layers.0.mlp.router"):
        unknown = refusal(llm, write_adapter(tmp_path / name, pairs | {name: (a, b)}))
        assert f"'{name}'" in unknown
        assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in unknown
    twice = refusal(llm, write_adapter(tmp_path / "4", pairs | {Q.removeprefix("model."): (a, b)}))
    assert "two names" in twice
    nan = refusal(llm, write_adapter(tmp_path / "5", pairs | {Q: (a, b * float("nan"))}))
    assert "not finite in float32" in nan
    assert tokens(llm) == base


def test_a_rewritten_folder_is_read_again_for_a_new_id_or_in_place(llm: LLM, tmp_path: Path) -> None:
    folder, path = tmp_path / "a", str(tmp_path / "a")

    def write_and_ask(seed: int, *requests: LoRARequest) -> list[list[list[int]]]:
        write_adapter(folder, llama_pairs(seed=seed))
        return [tokens(llm, request) for request in requests]

    old, same = write_and_ask(21, LoRARequest("a", 1, path), LoRARequest("other", 1, path))
    kept, new = write_and_ask(22, LoRARequest("a", 1, path), LoRARequest("a", 2, path))
    assert old == same == kept != new
    replaced, kept = write_and_ask(23, LoRARequest("a", 2, path, load_inplace=True), LoRARequest("a", 2, path))
    assert old != replaced != new
    assert kept == replaced == write_and_ask(23, LoRARequest("a", 3, path))[0]


def test_names_without_the_models_prefix_are_found(llm: LLM, tmp_path: Path) -> None:
    pairs = llama_pairs(seed=3)
    bare = {name.removeprefix("model."): pair for name, pair in pairs.items()}
    folders = write_adapter(tmp_path / "full", pairs), write_adapter(tmp_path / "bare", bare)
    assert tokens(llm, request(folders[0])) == tokens(llm, request(folders[1])) != tokens(llm)


def test_adapters_work_again_after_a_sleep(llm: LLM, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs(seed=4))
    before = tokens(llm, request(folder))
    for level in (1, 2):
        llm.sleep(level=level)
        with pytest.raises(Unavailable):
            tokens(llm, request(write_adapter(tmp_path / "new", llama_pairs(seed=5))))
        llm.wake_up()
        assert tokens(llm, request(folder)) == before


def errors(llm: LLM, folder: Path) -> set[tuple[str | None, str | None]]:
    """Return the kinds of the errors of requests for an adapter, and the ends of their texts."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=request(folder))
    return {(each.error_kind, each.error) for each in outputs}


def test_requests_for_an_adapter_that_has_changed_end_alone(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs(seed=6))
    llm = LLM(str(model), enable_lora=True, **SETTINGS)
    before, base = tokens(llm, request(folder)), tokens(llm)
    file = folder / "adapter_model.safetensors"
    original = load_file(file)
    save_file({name: 2 * each for name, each in original.items()}, file)
    llm.sleep(level=2)
    llm.wake_up()
    ((kind, text),) = errors(llm, folder)
    assert kind == "unavailable"
    assert f"{folder}: its files have changed" in str(text)
    assert tokens(llm) == base
    save_file(original, file)
    assert tokens(llm, request(folder)) == before
    llm.shutdown()


def test_requests_for_an_adapter_that_stalls_end_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs(seed=7))
    llm = LLM(str(model), enable_lora=True, **SETTINGS)
    before = tokens(llm, request(folder))
    llm.sleep(level=2)
    file = folder / "adapter_config.json"
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    llm.wake_up()
    with monkeypatch.context() as patch:
        patch.setattr(progress, "STALL_S", 0.0)
        ((kind, text),) = errors(llm, folder)
    assert kind == "unavailable"
    assert f"{folder}: its source gave no byte" in str(text)
    fifo = file.rename(tmp_path / "fifo")
    file.write_bytes(content)
    os.close(os.open(fifo, os.O_RDWR))  # the hanging read returns
    assert tokens(llm, request(folder)) == before
    llm.shutdown()


def test_a_start_reads_its_adapters(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs(rank=17))
    with pytest.raises(StartupError, match="--max-lora-rank 16"):
        LLM(str(model), enable_lora=True, lora_modules=[f"a={folder}"], **SETTINGS)
    llm = LLM(str(model), enable_lora=True, max_lora_rank=32, lora_modules=[f"a={folder}", f"b={folder}"], **SETTINGS)
    assert len(set(llm.ready_info.adapters.values())) == 1
    assert list(llm.ready_info.adapters) == ["a", "b"]
    llm.shutdown()


def test_requests_for_adapters_need_the_setting(model: Path, tmp_path: Path) -> None:
    llm = LLM(str(model), **SETTINGS)
    assert "--enable-lora" in refusal(llm, write_adapter(tmp_path / "a", llama_pairs()))
    with pytest.raises(InvalidRequest, match="must be a LoRARequest"):
        tokens(llm, "name")
    with pytest.raises(InvalidRequest, match="2 entries for 4 prompts"):
        tokens(llm, [None, None])
    llm.shutdown()


def test_a_request_for_an_adapter_that_is_not_loaded_ends_alone(llm: LLM) -> None:
    unknown, known = (llm._build(llm._tokenize(PROMPTS[:1], None), GREEDY, None)[0] for _ in range(2))
    unknown.request.adapter = "unknown"
    outputs = llm._complete([unknown, known], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "'unknown' is not loaded" in str(outputs[0].error)


@pytest.mark.parametrize("arguments", [("", 1, "a"), ("a", 0, "a"), ("a", 1, "")], ids=str)
def test_bad_lora_requests_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest):
        LoRARequest(*arguments)


def test_steps_of_base_rows_are_recorded_beside_adapters(model: Path, tmp_path: Path) -> None:
    """An adapter's step runs eagerly, and its layers have no hook afterwards."""
    llm = LLM(str(model), enable_lora=True, **{**SETTINGS, "dtype": "bfloat16"})
    base = tokens(llm)
    graphs = llm._core._executor._runner.model._graphs.graphs
    recorded = set(graphs)
    folder = write_adapter(tmp_path / "a", llama_pairs(seed=7))
    adapted = tokens(llm, request(folder))
    assert adapted != base
    assert set(graphs) == recorded
    assert tokens(llm) == base
    llm.shutdown()
