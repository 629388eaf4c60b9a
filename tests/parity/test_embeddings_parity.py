"""Vectors of `LLM.embed` equal the last hidden rows of transformers' `AutoModel`, with chunks, preemption and caching.

The folders are those of a causal model, with a head, and those that `AutoModel` saves, without one.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from octavo_engine import LLM, PoolingParams
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.embedders import (
    cosines,
    draw_texts,
    embed_under_pressure,
    make_embedder,
    pooled_rows,
    preemption_every,
)
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from transformers import AutoModelForCausalLM

MIN_COSINE = 0.99999


@pytest.mark.parametrize("caching", [True, False])
def test_vectors_are_last_rows(tmp_path: Path, caching: bool) -> None:
    folder, texts = make_embedder("qwen3", tmp_path), draw_texts(30, longest=130)
    with preemption_every(5):
        vectors, stats = embed_under_pressure(folder, texts, runner="pooling", enable_prefix_caching=caching)
    assert cosines(vectors, pooled_rows(folder, texts)).min() >= MIN_COSINE
    assert np.allclose(np.linalg.norm(vectors, axis=-1), 1.0, atol=1e-5)
    assert stats.preemptions > 0
    assert (stats.prefix_cache_hits > 0) == caching


@pytest.mark.parametrize("swap_space", [0.0, 0.001], ids=["recompute", "swap"])
@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_rows_of_all_tokens_are_pooled(tmp_path: Path, kind: str, swap_space: float) -> None:
    """Shared prefixes and preempted prompts are computed again, as cached blocks hold no rows."""
    folder, texts = make_embedder("qwen3", tmp_path), draw_texts(30, longest=130)
    settings = {"runner": "pooling", "pooler_config": {"pooling_type": kind}, "swap_space": swap_space}
    with preemption_every(5):
        vectors, stats = embed_under_pressure(folder, texts, **settings)
    assert cosines(vectors, pooled_rows(folder, texts, kind)).min() >= MIN_COSINE
    assert stats.preemptions > 0
    assert (stats.swapped_out_blocks > 0) == (swap_space > 0)
    assert stats.prefix_cache_hits == stats.swapped_in_blocks == 0


def test_scores_are_cosines(tmp_path: Path) -> None:
    folder, texts = make_embedder("llama", tmp_path), [[5, 6], [7, 8, 9], [10], [5, 6]]
    llm = LLM(str(folder), dtype="float32", runner="pooling", num_gpu_blocks_override=50)
    rows = pooled_rows(folder, texts)
    one = llm.score(texts[0], texts[1:], use_tqdm=False)
    pairs = llm.score(texts[:2], texts[2:], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="data_1 has 2 prompts and data_2 3"):
        llm.score(texts[:2], texts[1:])
    llm.shutdown()
    assert np.allclose([output.outputs.score for output in one], cosines(rows[1:], rows[:1]), atol=1e-5)
    assert np.allclose([output.outputs.score for output in pairs], cosines(rows[:2], rows[2:]), atol=1e-5)
    assert one[0].prompt_token_ids == texts[0] + texts[1]


@pytest.mark.parametrize("name", ["llama_biased_tied", "mistral"])
def test_folders_without_head(tmp_path: Path, name: str) -> None:
    folder, texts = make_embedder(name, tmp_path, with_head=False), draw_texts(12, longest=70)
    vectors, _ = embed_under_pressure(folder, texts)
    assert cosines(vectors, pooled_rows(folder, texts)).min() >= MIN_COSINE


def test_shorter_vectors_are_cut_and_normalised(tmp_path: Path) -> None:
    folder, texts = make_embedder("qwen3", tmp_path, is_matryoshka=True), [[5, 6, 7], [8, 9]]
    rows = pooled_rows(folder, texts)
    llm = LLM(str(folder), dtype="float32", runner="pooling", num_gpu_blocks_override=50)
    cut, raw = PoolingParams(dimensions=24), PoolingParams(normalize=False)
    outputs = [llm.embed(text, pooling_params=params, use_tqdm=False)[0] for params in (cut, raw) for text in texts]
    llm.shutdown()
    vectors = [np.array(output.outputs.embedding) for output in outputs]
    for row, vector in zip(rows[:, :24], vectors[:2], strict=True):
        assert np.allclose(vector, row / np.linalg.norm(row), atol=1e-5)
    assert np.allclose(np.stack(vectors[2:]), rows, atol=1e-3)


def test_prompts_are_cut_as_over_http(tmp_path: Path) -> None:
    folder = make_embedder("qwen3", tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_eos_token": true}')
    llm = LLM(str(folder), dtype="float32", runner="pooling", max_model_len=32, num_gpu_blocks_override=50)
    text, end = "abcdefgh" * 9, llm.get_tokenizer().eos_token_id
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)

    def cut(prompt: str | list[int], **options: object) -> list[int]:
        (output,) = llm.embed(prompt, use_tqdm=False, tokenization_kwargs=options)
        return output.prompt_token_ids

    assert cut(text, truncate_prompt_tokens=10) == [*ids[:9], end]
    assert cut(ids, truncate_prompt_tokens=10) == cut(text, truncate_prompt_tokens=10, add_special_tokens=False)
    assert cut(ids, truncate_prompt_tokens=10) == ids[:10]
    assert cut(text, truncate_prompt_tokens=10, truncation_side="left") == [*ids[-9:], end]
    assert cut(text, truncate_prompt_tokens=-1) == [*ids[:31], end]
    assert cut("ab", add_special_tokens=False) == ids[:2]
    (score,) = llm.score(text, text, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 4})
    assert score.prompt_token_ids == [*ids[:3], end] * 2
    for options in (
        {"truncate_prompt_tokens": 33},
        {"truncate_prompt_tokens": -2},
        {"truncation_side": "top"},
        {"x": 1},
    ):
        with pytest.raises(InvalidRequest) as refused:
            cut(text, **options)
        assert refused.value.param == next(iter(options))
    (row,) = pooled_rows(folder, [[*ids[:3], end]])
    for params in (PoolingParams(use_activation=False), PoolingParams(normalize=False)):
        (output,) = llm.embed([[*ids[:3], end]], use_tqdm=False, pooling_params=params)
        assert np.allclose(output.outputs.embedding, row, atol=1e-3)
    with pytest.raises(InvalidRequest, match="use_activation"):
        PoolingParams(use_activation=True, normalize=False)
    llm.shutdown()


def test_prompt_may_fill_context_and_cache(tmp_path: Path) -> None:
    """The second time, every block is cached and none is free for the copy of the last one."""
    folder, text = make_embedder("llama", tmp_path), [[3 + i % 250 for i in range(64)]]
    llm = LLM(
        str(folder), dtype="float32", runner="pooling", max_model_len=64, num_gpu_blocks_override=4, watermark=0.0,
        debug_invariants=True,
    )  # fmt: skip
    vectors = [np.array(llm.embed(text, use_tqdm=False)[0].outputs.embedding) for _ in range(3)]
    assert llm.stats.prefix_cache_hits == 2 * 48
    llm.shutdown()
    assert min(cosines(vector, pooled_rows(folder, text)[0]) for vector in vectors) >= MIN_COSINE


def test_not_a_number_fails_only_its_text(tmp_path: Path) -> None:
    folder = make_embedder("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    model.save_pretrained(folder)
    texts = [[5, 6], [3 + i for i in range(40)], [7, 8], [9]]
    llm = LLM(str(folder), dtype="float32", runner="pooling", num_gpu_blocks_override=50)
    for _ in range(2):
        outputs = llm.embed(texts, use_tqdm=False)
        assert [output.error is not None and "not finite" in output.error for output in outputs] == [0, 1, 0, 1]
        assert [output.outputs.hidden_size for output in outputs] == [64, 0, 64, 0]
        vectors = np.array([outputs[index].outputs.embedding for index in (0, 2)])
        assert cosines(vectors, pooled_rows(folder, [texts[0], texts[2]])).min() >= MIN_COSINE
    llm.shutdown()


def test_an_embedding_model_generates_nothing(tmp_path: Path) -> None:
    llm = LLM(str(make_embedder("llama", tmp_path)), dtype="float32", runner="pooling", num_gpu_blocks_override=50)
    for generate in (llm.generate, llm.enqueue):
        with pytest.raises(InvalidRequest, match=r"LLM\.embed"):
            generate("a")
    with pytest.raises(InvalidRequest, match="dimensions"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        llm.embed("a", pooling_params=[PoolingParams()] * 2)
    assert llm.stats.received == 0
    llm.shutdown()


def test_gguf_file_as_embedding_model(tmp_path: Path) -> None:
    model, texts = tiny_model("qwen3"), [[5, 6, 7], [90, 3]]
    write_tiny_gguf(tmp_path / "m.gguf", "qwen3", model)
    tokenizer = make_embedder("llama", tmp_path / "tokenizer")
    llm = LLM(
        str(tmp_path / "m.gguf"), tokenizer=str(tokenizer), runner="pooling", dtype="float32", max_model_len=64,
        num_gpu_blocks_override=50,
    )  # fmt: skip
    vectors = np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    llm.shutdown()
    with torch.no_grad():
        expected = torch.stack([model.model(torch.tensor([text])).last_hidden_state[0, -1] for text in texts]).numpy()
    assert cosines(vectors, expected).min() >= MIN_COSINE
