"""`octavo bench throughput` and `latency`: the engine in this process, with a model of one layer."""

import json
import re

import pytest
from octavo_server.cli.main import main
from octavo_testing.scripted import write_byte_model

pytestmark = pytest.mark.slow

TINY = ("--load-format", "dummy", "--dtype", "float32", "--num-threads", "1", "--num-gpu-blocks-override", "200")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_byte_model(tmp_path_factory.mktemp("byte-model")))


def bench(kind, folder, *flags):
    return main(["bench", kind, "--model", folder, *TINY, "--disable-tqdm", *flags])


def test_throughput_prints_its_line_and_counts(folder, tmp_path, capsys):
    file = tmp_path / "t.json"
    flags = ("--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--n", "2", "--output-json", str(file))
    assert bench("throughput", folder, *flags) == 0
    out, err = capsys.readouterr()
    number = r"\d+\.\d\d"
    assert re.match(
        rf"Throughput: {number} requests/s, {number} total tokens/s, {number} output tokens/s\n"
        r"Total num prompt tokens:  120\n"
        r"Total num output tokens:  60\n"
        r"Prefix cache hit rate:    0\.00%\n$",
        out,
    )
    assert "WARNING" not in err
    saved = json.loads(file.read_text())
    assert (saved["num_requests"], saved["total_num_tokens"]) == (6, 180)
    assert saved["requests_per_second"] == pytest.approx(6 / saved["elapsed_time"])


def test_throughput_warns_about_equal_prompts(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the same again " * 10}) + "\n")
    flags = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "2")
    assert bench("throughput", folder, *flags, "--num-prompts", "8", "--max-num-seqs", "1") == 0
    assert "--no-enable-prefix-caching" in capsys.readouterr().err


def test_latency_prints_its_lines(folder, tmp_path, capsys):
    file = tmp_path / "l.json"
    flags = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    )
    assert bench("latency", folder, *flags, "--output-json", str(file)) == 0
    labels = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["Avg latency", "Std latency", *(f"{p}% percentile latency" for p in (10, 25, 50, 75, 90, 99))]
    saved = json.loads(file.read_text())
    assert len(saved["latencies"]) == 3
    assert min(saved["latencies"]) <= saved["avg_latency"] <= max(saved["latencies"])
    assert list(saved["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("throughput", ("--dataset-name", "hf"), "use one of random"),
        ("throughput", ("--num-prompts", "1", "--input-len", "2000"), "512"),
        ("latency", ("--gpu-memory-utilization", "7"), "gpu_memory_utilization"),
    ],
)
def test_invalid_options_are_one_line(kind, flags, message, folder, capsys):
    assert bench(kind, folder, *flags) == 1
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("octavo: ")]
    assert len(err) == 1
    assert message in err[0]
