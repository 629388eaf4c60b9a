"""`octavo serve` of a random Granite: chat by the openai package, sleep and wake, other flags at the start."""

from pathlib import Path

import httpx
import pytest
from octavo_testing.serve_command import octavo_serve
from octavo_testing.tiny_models import make_tiny
from openai import OpenAI

pytestmark = pytest.mark.slow

FLAGS = ("--served-model-name=m", "--max-model-len=128", "--num-gpu-blocks-override=64", "--dtype=float32")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_a_random_granite_answers_sleeps_and_wakes(tmp_path: Path) -> None:
    folder = make_tiny("granite", tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = (*FLAGS, f"--chat-template={template}", "--enable-sleep-mode")
    with octavo_serve(tmp_path, str(folder), *flags) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

        def answer() -> str:
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=12
            )
            assert reply.usage is not None
            assert reply.usage.completion_tokens > 0
            return str(reply.choices[0].message.content)

        first = answer()
        assert answer() == first  # from cached blocks
        loaded = server.core.memory_info().rss
        assert httpx.post(f"{server.url}/sleep?level=2").status_code == 200
        assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
        assert server.core.memory_info().rss <= loaded
        assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
        assert answer() == first
    assert "GraniteForCausalLM is run by transformers" in server.log.read_text()


def test_dummy_weights_are_served(tmp_path: Path) -> None:
    folder = make_tiny("granite", tmp_path)
    (folder / "model.safetensors").unlink()
    with octavo_serve(tmp_path, str(folder), *FLAGS, "--load-format=dummy") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        reply = client.completions.create(model="m", prompt="hello", temperature=0, max_tokens=5)
        assert reply.usage is not None
        assert reply.usage.completion_tokens > 0
