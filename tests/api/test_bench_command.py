"""`octavo bench serve` against a scripted engine behind a real server, so that every count is known."""

import asyncio
import json
import sys

import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import free_port
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.slow

BENCH = ("-m", "octavo_server.cli.main", "bench", "serve")
#: Prompts of 14 tokens: 13 bytes and the end of the text.
REPLY = "Hello, world!"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return ScriptedClient(write_byte_model(tmp_path_factory.mktemp("byte-model")))


@pytest.fixture
async def served(engine):
    engine.reset()
    engine.replies = [REPLY]
    engine.stats.prefix_cache_queries = engine.stats.prefix_cache_hits = 0
    async with serving(engine) as served:
        yield served


async def bench(*argv):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *BENCH, "--disable-tqdm", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def lines(out):
    """Label -> value of a report block."""
    pairs = (line.rsplit(":", 1) for line in out.splitlines() if ":" in line)
    return {label.strip(): value.strip() for label, value in pairs}


async def test_counts_are_exact(served):
    flags = ("--num-prompts", "7", "--random-input-len", "20", "--random-output-len", "5", "--num-warmups", "2")
    code, out, err = await bench("--base-url", served.url, *flags, "--max-concurrency", "3")
    assert (code, err) == (0, "")
    shown = lines(out)
    assert shown["Successful requests"] == "7"
    assert shown["Failed requests"] == "0"
    assert shown["Maximum request concurrency"] == "3"
    assert shown["Total input tokens"] == "140"
    assert shown["Total generated tokens"] == "35"
    assert float(shown["Mean TTFT (ms)"]) > 0
    assert shown["Prefix cache hit rate (%)"] == "0.00"
    assert len(served.engine.requests) == 9
    assert {len(request.prompt_token_ids) for request in served.engine.requests} == {20}
    assert {request.params.ignore_eos for request in served.engine.requests} == {True}


async def test_chat_benchmark_with_a_file_saves_all_results(served, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "3", "--temperature", "0")
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json")
    code, out, _ = await bench(
        *("--base-url", served.url, "--backend", "openai-chat", *flags, *saved),
        *("--metadata", "chip=none", "--percentile-metrics", "e2el", "--metric-percentiles", "50,99"),
    )
    assert code == 0
    assert "TTFT" not in out
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (result["completed"], result["total_output_tokens"], result["chip"]) == (3, 42, "none")
    assert result["generated_texts"] == [REPLY] * 3
    assert result["request_rate"] == "inf"
    assert result["p99_e2el_ms"] >= result["p50_e2el_ms"] > 0
    assert [len(itls) for itls in result["itls"]] == [12] * 3
    assert {request.params.temperature for request in served.engine.requests} == {0}


async def test_results_that_cannot_be_saved_end_a_benchmark_before_its_requests(served, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = await bench("--base-url", served.url, "--save-result", "--result-dir", str(tmp_path / "file"))
    assert code == 1
    assert "File exists" in err
    assert not served.engine.requests


async def test_a_name_of_results_may_have_folders(served, tmp_path):
    flags = ("--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "4", "--save-result")
    for name in ("new/result.json", str(tmp_path / "other" / "result.json")):
        folder = tmp_path / f"of {len(name)}"
        places = ("--result-dir", str(folder), "--result-filename", name)
        assert (await bench("--base-url", served.url, *flags, *places))[::2] == (0, "")
        assert (folder / name).is_file()


async def test_a_label_may_have_slashes(served, tmp_path):
    flags = ("--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "4", "--label", "a/b")
    code, _, err = await bench("--base-url", served.url, *flags, "--save-result", "--result-dir", str(tmp_path))
    assert (code, err) == (0, "")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("a-b-infqps-")


async def test_a_sweep_has_a_block_for_each_load_and_a_table(served, tmp_path):
    flags = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4")
    code, out, err = await bench(
        *("--base-url", served.url, *flags, "--request-rate", "50,100,inf"),
        *("--append-result", "--result-filename", "r.jsonl"),
        *("--result-dir", str(tmp_path)),
    )
    assert (code, err) == (0, "")
    assert out.count("Serving Benchmark Result") == 3
    assert [line.split()[1] for line in out.splitlines() if line.lstrip().startswith(("50 ", "100 ", "inf "))] == [
        "4/4"
    ] * 3
    assert [json.loads(line)["request_rate"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [
        50,
        100,
        "inf",
    ]
    assert len({tuple(request.prompt_token_ids) for request in served.engine.requests}) == 12


async def test_failures_are_counted_with_the_first_reason(served, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "x" * 600}) + "\n")
    flags = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--num-prompts", "2")
    code, out, err = await bench("--base-url", served.url, *flags, "--custom-output-len", "4")
    assert code == 0
    assert (lines(out)["Successful requests"], lines(out)["Failed requests"]) == ("1", "1")
    assert "WARNING: 1 of 2 requests failed; the first: HTTP 400: " in err
    assert "512" in err


async def test_exit_code_is_1_if_all_requests_fail(served):
    served.engine.fail_at = 1
    code, out, err = await bench("--base-url", served.url, "--num-prompts", "2", "--random-input-len", "8")
    assert code == 1
    assert lines(out)["Failed requests"] == "2"
    assert "the first: the step failed: scripted" in err


async def test_high_prefix_cache_hit_rate_gives_a_warning(served):
    """The scripted counters of the engine rise with every request."""

    class Counting(list):
        def append(self, request):
            served.engine.stats.prefix_cache_queries += len(request.prompt_token_ids)
            served.engine.stats.prefix_cache_hits += len(request.prompt_token_ids) // 2
            super().append(request)

    served.engine.requests = Counting()
    flags = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "2")
    code, out, err = await bench("--base-url", served.url, *flags)
    assert code == 0
    assert lines(out)["Prefix cache hit rate (%)"] == "50.00"
    assert "50% of the prompt tokens were found" in err
    assert "--reset-prefix-cache" in err
    _, _, err = await bench("--base-url", served.url, *flags, "--random-prefix-len", "4")
    assert err == ""


async def test_served_name_may_differ_from_the_tokenizer_model(served):
    names = ("--model", served.engine.config.model, "--served-model-name", MODEL, "--trust-remote-code")
    code, out, err = await bench("--base-url", served.url, "--num-prompts", "1", "--random-input-len", "4", *names)
    assert (code, err) == (0, "")
    assert lines(out)["Successful requests"] == "1"


async def test_missing_server_is_one_line():
    port = free_port()
    code, out, err = await bench("--port", str(port))
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert f"octavo serve --port {port}" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset-name", "sonnet"), "use one of random"),
        (("--tokenizer", "/nowhere"), "/nowhere"),
        (("--goodput", "ttft"), "NAME:MS"),
    ],
    ids=" ".join,
)
async def test_invalid_options_are_one_line(served, flags, message):
    code, _, err = await bench("--base-url", served.url, *flags)
    assert code == 1
    (line,) = err.splitlines()
    assert message in line
