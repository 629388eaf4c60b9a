"""The log of a real `octavo serve`: each line has the chosen format and request ids, and no line has a key."""

import json

import httpx
import pytest
from octavo_testing.core_process import scripted_environment
from octavo_testing.scripted import write_byte_model
from octavo_testing.scripted_serve import SCRIPTED_SERVE
from octavo_testing.serve_command import octavo_serve

pytestmark = pytest.mark.slow

TINY = ("--load-format", "dummy", "--max-model-len", "64")
KEY = "sk-very-secret-key"


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with scripted_environment():
        yield str(write_byte_model(folder))


def test_json_lines_carry_the_request_id_and_no_key(tiny, tmp_path):
    flags = ("--log-format", "json", "--enable-log-requests", "--max-log-len", "3", "--api-key", KEY)
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine"}
    with octavo_serve(tmp_path, tiny, *TINY, *flags, module=SCRIPTED_SERVE) as serving:
        for prompt in ("abcdef", "x" * 100):
            body = {"prompt": prompt, "max_tokens": 2}
            httpx.post(f"{serving.url}/v1/completions", json=body, headers=headers, timeout=240)
        httpx.get(f"{serving.url}/metrics?x=1")
    text = serving.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["process"] for line in lines} >= {"api"}
    about = [line for line in lines if line.get("request_id") == "mine"]
    assert any("'abc'" in line["message"] and "abcdef" not in line["message"] for line in about)
    statuses = [line["message"][-3:] for line in about if line["logger"] == "uvicorn.access"]
    assert statuses == ["200", "400"]
    assert not any("/health" in line["message"] or "/metrics" in line["message"] for line in lines)
    assert "secret" not in text


def test_text_lines_name_the_request(tiny, tmp_path):
    flags = ("--disable-uvicorn-access-log", "--enable-log-requests")
    with octavo_serve(tmp_path, tiny, *TINY, *flags, module=SCRIPTED_SERVE) as serving:
        body = {"prompt": "a", "max_tokens": 2}
        for extra in ({}, {"request_id": "the-bodys"}):
            headers = {"X-Request-Id": "mine"}
            httpx.post(f"{serving.url}/v1/completions", json=body | extra, headers=headers, timeout=240)
    text = serving.log.read_text()
    assert " [the-bodys] request cmpl-the-bodys: " in text
    assert " [mine] request cmpl-mine: " in text
    assert "HTTP/1.1" not in text
