"""Every script of the table in `benchmarks/README.md` runs in its smallest form, or `NOT_RUN` gives the reason."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from octavo_testing.tiny_models import byte_tokenizer, tiny_config
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Script -> arguments. `{tiny}`: a model with few weights, long prompts and many token ids.
SMALLEST = {
    "prefix_overhead.py": "--model {tiny} --pairs 1",
    "http_overhead.py": "--only paced --streams 2 --output-tokens 8 --repetitions 1 --alone 2",
    "scrape_cost.py": "--streams 2 --scrapes 2 --window 0.5 --repetitions 1",
    "prefix_timing.py": "--model {tiny} --rounds 2 --prompt-tokens 64",
    "kv_waste.py": "--model {tiny} --requests 2",
    "quantised_weights.py": "--rounds 1 --steps 1 --readers 256",
    "decode_step.py": "--model {tiny} --rows 1 --steps 2 --context 16",
    "lora.py": "--model {tiny} --adapters 1 --requests 1 --rounds 1",
    "speculation.py": "--model {tiny} --prompts 1 --max-tokens 4 --runs 1",
    "scheduler_step.py": "--running 2 --steps 4",
    "gpu_eager_host.py": "--repetitions 1",
    "gpu_host_time.py": "--rows 2 --vocab 64 --context 32 --steps 2",
    "sampling.py": "--rows 1 --vocab 64 --steps 1",
    "router_prompts.py": "--count 2",
    "router_decision.py": "--count 2",
    "router_fleet.py": "--replicas 2 --rate 2 --seconds 0.5 --repetitions 1",
    "router_faults.py": "--entries 1000 --replicas 1 --repetitions 1",
    "router_kill.py": "--streams 3 --rate 2 --repetitions 1",
    "soak.py": "--minutes 0.4 --kill-every 0.6 --sample-every 1",
    "router_simulator.py": "--workload hot --policy octavo --load 0.3 --replicas 2 --requests 10 --quiet",
    "router_scale_down.py": "--load even --seeds 1 --replicas 2 --quiet",
    "fair_tenants.py": "--seconds 1 --rows n=256",
    "machine.py": "",
    "perplexity.py": "--windows 1",
    "structured.py": "--model {tiny} --requests 1 --turns 1 --concurrency 1 --tokens 32",
    "embeddings.py": "--texts 8 --tokens 8 --runs 1 --layers 1",
    "experts.py": "--streams 1 --tokens 4 --repetitions 1 --layers 1",
    "prefix_index.py": "--entries 20000 --repetitions 2",
    "fair_steps.py": "--model {tiny} --long-tokens 2304 --short-prompts 1 --repetitions 1 --output-tokens 1",
    "gguf_stream.py": "--tokens 4 --repetitions 1 --layers 1",
    "tensor_parallel.py": "--streams 1 --tokens 4 --rounds 1 --layers 1",
    "router_replicas.py": "--replicas 1 --requests 2 --only multi-turn --policies octavo --capacity 5",
}
NOT_RUN = {
    "offline.py": "test_house_benchmarks.py runs it with scripted engines",
    "router_latency.py": "it needs wrk",
    "gpu/run": "tests of the house run its steps with --device cpu",
    "operator_scale.py": "it needs a cluster's API server",
    "metrics_api_delay.py": "it needs a cluster's API server",
    "wake_from_zero.py": "it needs a cluster",
}


def test_every_script_of_the_table_runs_or_has_a_reason():
    table = (BENCHMARKS / "README.md").read_text()
    assert set(re.findall(r"^\| `benchmarks/(\S+)`", table, re.MULTILINE)) == SMALLEST.keys() | NOT_RUN.keys()
    assert not SMALLEST.keys() & NOT_RUN.keys()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("tiny"), tiny_config("llama")
    config.update({"max_position_embeddings": 8192, "vocab_size": 49152})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize("script", SMALLEST)
def test_a_script_runs_in_its_smallest_form(tiny, tmp_path, script):
    command = [sys.executable, str(BENCHMARKS / script), *SMALLEST[script].format(tiny=tiny).split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    assert result.returncode in (0, 1), "1: the machine has missed a goal"
    assert result.stdout.strip(), "a script prints its figures"
