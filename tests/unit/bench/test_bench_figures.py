"""Figures, report block and warnings computed from records, with vLLM's definitions and lines."""

import math
import statistics

import pytest
from octavo_server.bench.load import RequestRecord
from octavo_server.bench.metrics import Distribution, PrefixCache, figures, parse_prefix_cache
from octavo_server.bench.report import Run, block, result, table, warnings

#: Two requests of four tokens, one second apart, and one that failed.
RECORDS = [
    RequestRecord(
        prompt_tokens=10, start_s=0.0, ttft_s=0.1, latency_s=0.4, itls_s=[0.1, 0.1, 0.1], output_tokens=4, text="abcd"
    ),
    RequestRecord(prompt_tokens=20, start_s=1.0, ttft_s=0.3, latency_s=1.2, itls_s=[0.5, 0.4], output_tokens=4),
    RequestRecord(prompt_tokens=30, start_s=1.0, error="HTTP 500: broken"),
]


def run(records=RECORDS, rate=2.0, concurrency=None, duration_s=2.5, cache=None, goodput=None, cpu_s=0.1):
    return Run(
        request_rate=rate,
        max_concurrency=concurrency,
        figures=figures(records, duration_s, goodput or {}),
        records=records,
        prefix_cache=cache,
        client_cpu_s=cpu_s,
    )


def test_report_block_has_vllm_s_lines():
    shown = block(run(goodput={"ttft": 200}), ["ttft", "tpot", "itl", "e2el"], [50, 99.9])
    assert shown.splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Request rate configured (RPS):           2.00      ",
        "Benchmark duration (s):                  2.50      ",
        "Total input tokens:                      30        ",
        "Total generated tokens:                  8         ",
        "Request throughput (req/s):              0.80      ",
        "Request goodput (req/s):                 0.40      ",
        "Output token throughput (tok/s):         3.20      ",
        "Peak output token throughput (tok/s):    4.00      ",
        "Peak concurrent requests:                1.00      ",
        "Total token throughput (tok/s):          15.20     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00    ",
        "Median TTFT (ms):                        200.00    ",
        "P50 TTFT (ms):                           200.00    ",
        "P99.9 TTFT (ms):                         299.80    ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          200.00    ",
        "Median TPOT (ms):                        200.00    ",
        "P50 TPOT (ms):                           200.00    ",
        "P99.9 TPOT (ms):                         299.80    ",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           240.00    ",
        "Median ITL (ms):                         100.00    ",
        "P50 ITL (ms):                            100.00    ",
        "P99.9 ITL (ms):                          499.60    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          800.00    ",
        "Median E2EL (ms):                        800.00    ",
        "P50 E2EL (ms):                           800.00    ",
        "P99.9 E2EL (ms):                         1199.20   ",
        "----------Conditions of the Measurement-----------",
        "Client CPU (% of a core):                4.00      ",
        "==================================================",
    ]


def test_optional_lines_depend_on_the_load():
    shown = block(run(rate=math.inf, concurrency=7, cache=PrefixCache(200, 50)), ["itl"], [99])
    assert "Maximum request concurrency:             7         " in shown
    assert "Request rate" not in shown
    assert "goodput" not in shown
    assert "TTFT" not in shown
    assert "Prefix cache hit rate (%):               25.00     " in shown


@pytest.mark.parametrize("percent", [0, 1, 25, 50, 90, 99, 100])
def test_percentiles_interpolate_as_numpy_does(percent):
    numpy = pytest.importorskip("numpy")
    values = sorted([3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0])
    assert Distribution(values).percentile(percent) == pytest.approx(numpy.percentile(values, percent))
    assert Distribution(values).std == pytest.approx(statistics.pstdev(values))


def test_run_without_requests_has_zero_figures():
    empty = figures([RECORDS[2]], 1.0, {})
    assert (empty.completed, empty.failed, empty.output_throughput) == (0, 1, 0)
    assert empty.latencies["ttft"].percentile(99) == 0


def test_goodput_needs_every_limit():
    assert figures(RECORDS, 1.0, {"ttft": 500, "e2el": 1000}).good == 1
    assert figures(RECORDS, 1.0, {"tpot": 1000}).good == 2


def test_result_file_has_vllm_s_keys():
    shown = result(run(), ["ttft"], [99], detailed=True)
    assert shown["completed"] == 2
    assert shown["p99_ttft_ms"] == pytest.approx(298)
    assert shown["errors"] == ["", "", "HTTP 500: broken"]
    assert {"duration", "total_input_tokens", "output_throughput", "mean_ttft_ms", "std_ttft_ms"} <= shown.keys()
    assert "ttfts" not in result(run(), ["ttft"], [99], detailed=False)


def test_warnings_name_the_cause_and_the_remedy():
    messages = warnings(run(cache=PrefixCache(100, 50), cpu_s=2.4), allows_hits=False, was_reset=False)
    assert [text.split(";")[-1].split(":")[-1].strip() for text in messages[:1]] == [
        "use another --seed, or pass --reset-prefix-cache."
    ]
    assert "50% of the prompt tokens" in messages[0]
    assert "96% of a core" in messages[1]
    assert messages[2] == "1 of 3 requests failed; the first: HTTP 500: broken"


@pytest.mark.parametrize(
    ("cache", "allows_hits"), [(None, False), (PrefixCache(100, 1), False), (PrefixCache(9, 9), True)]
)
def test_run_without_problems_has_no_warning(cache, allows_hits):
    assert warnings(run(RECORDS[:2], cache=cache), allows_hits=allows_hits, was_reset=False) == []


def test_prefix_cache_counters_are_summed_for_any_metric_prefix():
    text = (
        "# HELP vllm:prefix_cache_queries_total x\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0\n'
        'vllm:external_prefix_cache_queries_total{engine="0"} 7.0\n'
        'vllm:gpu_prefix_cache_hits_total{engine="0"} 5.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3e1\n'
    )
    found = parse_prefix_cache(text)
    assert found == PrefixCache(120, 30)
    assert parse_prefix_cache(text.replace("vllm:", "")) == found
    assert parse_prefix_cache("up 1\n") is None
    assert found.since(PrefixCache(100, 20)).hit_rate == 0.5


def at_rate(rate, duration_s):
    records = [RequestRecord(prompt_tokens=1, start_s=i / rate, latency_s=0.1, output_tokens=1) for i in range(20)]
    return run(records, rate=rate, duration_s=duration_s)


def test_sweep_table_has_a_row_per_load():
    head, first, _ = table([at_rate(1, 20.0), at_rate(2, 10.0)]).splitlines()
    assert head.split()[:2] == ["rate", "req/s"]
    assert first.split()[:4] == ["1", "20/20", "1.00", "1.0"]
