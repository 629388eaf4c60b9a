"""`octavo serve --dry-run`: capacity as text and as JSON; `test_runner_capacity.py` tests the numbers themselves."""

import json
from dataclasses import replace

import pytest
from octavo_engine.runner.capacity import Capacity
from octavo_engine.settings.config import EngineConfig
from octavo_server.cli.dry_run import describe, size
from octavo_server.cli.main import main
from octavo_testing.scripted import write_byte_model

CAPACITY = Capacity(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    device="cpu",
    file_bytes=100 << 20,
    weights_bytes=300 << 20,
    adapters_bytes=0,
    context_length=8192,
    max_model_len=4096,
    max_num_seqs=64,
    block_size=16,
    num_blocks=1024,
    num_host_blocks=512,
    bytes_per_block=1 << 20,
    kv_bytes=1 << 30,
    total_bytes=8 << 30,
    available_bytes=4 << 30,
    rank_weights_bytes=(300 << 20,),
    rank_kv_bytes=(1 << 30,),
)


def test_report_lists_model_memory_and_flags():
    report = describe(EngineConfig(model="m"), CAPACITY).splitlines()
    assert report[:6] == [
        "model       m (LlamaForCausalLM), bfloat16 on cpu",
        "weights     300.0 MiB in memory (100.0 MiB on disk)",
        "KV cache    1.00 GiB: 1,024 blocks of 16 tokens = 16,384 tokens, 64.0 KiB each",
        "swap space  512.0 MiB: 512 blocks",
        "at once     4.0 requests of 4,096 tokens, or 8.0 requests of 2,048 tokens; at most 64 (--max-num-seqs)",
        "memory      4.00 GiB of 8.00 GiB available; 2.21 GiB remain free",
    ]
    assert "each GiB holds 16,384 tokens" in "\n".join(report)
    assert "--dtype float32" in "\n".join(report)


def test_report_shows_the_memory_of_adapters():
    config = EngineConfig(model="m", enable_lora=True, max_loras=3)
    report = describe(config, replace(CAPACITY, adapters_bytes=10 << 20))
    assert "adapters    10.0 MiB reserved for 3 of rank 16 (--max-loras, --max-lora-rank)" in report
    assert "2.20 GiB remain free" in report
    report = describe(replace(config, max_cpu_loras=5), replace(CAPACITY, adapters_bytes=10 << 20))
    assert "reserved for 5 of rank 16 (--max-cpu-loras, --max-lora-rank)" in report


def test_report_shows_the_memory_of_each_rank():
    capacity = replace(CAPACITY, rank_weights_bytes=(100 << 20, 200 << 20), rank_kv_bytes=(1 << 29, 1 << 29))
    row = "ranks       0: weights 100.0 MiB, KV cache 512.0 MiB; 1: weights 200.0 MiB, KV cache 512.0 MiB"
    assert row in describe(EngineConfig(model="m"), capacity)


def test_dry_run_works_as_a_command(tmp_path, capsys):
    folder = str(write_byte_model(tmp_path))
    flags = ["--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "40", "--num-threads", "1"]
    assert main(["serve", folder, *flags, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_blocks"], report["kv_tokens"], report["full_length_requests"]) == (40, 640, 1.25)
    assert main(["serve", folder, *flags, "--dry-run"]) == 0
    assert "40 blocks of 16 tokens = 640 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "report"),
    [
        (["--num-gpu-blocks-override", "3", "--max-model-len", "64", "--dry-run"], "--max-model-len to at most 48"),
        (["--json"], "add --dry-run"),
    ],
    ids=["too small", "json alone"],
)
def test_model_that_does_not_fit_is_one_line(flags, report, tmp_path, capsys):
    folder = str(write_byte_model(tmp_path))
    assert main(["serve", folder, "--load-format", "dummy", "--dtype", "float32", "--num-threads", "1", *flags]) == 1
    assert report in capsys.readouterr().err


def test_sizes_are_shown_with_units():
    assert [size(n) for n in (512, 3 << 20, 5 << 30)] == ["0.5 KiB", "3.0 MiB", "5.00 GiB"]
