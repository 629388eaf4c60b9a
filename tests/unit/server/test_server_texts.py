"""Texts for users: the banner and the log line about load."""

import json
import re
from types import SimpleNamespace

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.records import EngineStats
from octavo_server.cli.banner import banner
from octavo_server.cli.serve import describe_stats
from octavo_server.config import ServerConfig


class Engine:
    config = EngineConfig(model="/models/a")
    ready_info = ReadyInfo(
        max_model_len=2048, num_blocks=512, num_host_blocks=0, block_size=16, dtype="bfloat16", kv_dtype="bfloat16",
        device="cpu", weights_fingerprint="f", hash_root=b"", weights_bytes=2**29, kv_bytes=2**28,
    )  # fmt: skip
    frontend = SimpleNamespace(chat_template=object(), model=SimpleNamespace(pooling=None))


def test_banner_shows_capacity_address_and_example():
    model, cache, url, example = banner(Engine(), ServerConfig(served_model_names=("a",)), 8000, 4.25)
    assert model == "model /models/a as a: bfloat16 on cpu, 0.50 GiB"
    size = "KV cache 8,192 tokens (0.25 GiB, bfloat16)"
    assert cache == f"{size}: room for 4.0 requests of the full 2,048 tokens at once"
    assert url.startswith("serving at http://localhost:8000/v1 after 4.2 s")
    assert '"model": "a"' in example
    assert "Authorization" not in example


@pytest.mark.parametrize(
    ("pooling", "template", "route", "field"),
    [
        (None, object(), "/v1/chat/completions", "messages"),
        (None, None, "/v1/completions", "prompt"),
        (object(), object(), "/v1/embeddings", "input"),
        (object(), None, "/v1/embeddings", "input"),
    ],
)
def test_example_command_is_for_a_route_that_the_model_serves(pooling, template, route, field):
    engine = Engine()
    engine.frontend = SimpleNamespace(model=SimpleNamespace(pooling=pooling), chat_template=template)
    *_, example = banner(engine, ServerConfig(served_model_names=("a",)), 8000, 4.25)
    url, body = re.fullmatch(r"try: curl (\S+) -H \S+ \S+ -d '(.*)'", example).groups()
    assert (url, json.loads(body)["model"]) == (f"http://localhost:8000{route}", "a")
    assert field in json.loads(body)


def test_example_command_never_shows_the_key():
    config = ServerConfig(served_model_names=("/models/a",), host="::1", api_key=("secret",))
    text = "\n".join(banner(Engine(), config, 1, 1.0))
    assert "http://[::1]:1/v1" in text
    assert "Bearer KEY" in text
    assert "secret" not in text
    assert " as " not in text


def test_load_line_shows_rates_and_cache_use():
    before = EngineStats(prompt_tokens=100, generation_tokens=50, prefix_cache_queries=100, prefix_cache_hits=10)
    after = EngineStats(
        prompt_tokens=300, generation_tokens=150, prefix_cache_queries=300, prefix_cache_hits=110, running=2, waiting=1,
        in_use_blocks=25, total_blocks=100,
    )  # fmt: skip
    assert describe_stats(before, after, 10.0) == (
        "prompt 20.0 tokens/s, generation 10.0 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix hits 50.0%"
    )
    assert describe_stats(after, after, 10.0).endswith("prefix hits 0.0%")
