"""`/tokenizer_info`: the tokenizer's settings, behind a flag."""

import json

from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def test_tokenizer_info_has_the_settings_and_the_template(tmp_path):
    folder = write_byte_model(tmp_path)
    path = folder / "tokenizer_config.json"
    settings = {"model_max_length": 77, "pad_token": {"content": "<pad>", "special": True}}
    path.write_text(json.dumps(settings))
    engine = ScriptedClient(folder, chat_template=TEMPLATE)
    async with serving(engine, enable_tokenizer_info_endpoint=True) as served:
        answer = await served.http.get("/tokenizer_info")
    info = answer.json()
    assert answer.status_code == 200
    assert (info["chat_template"], info["model_max_length"]) == (TEMPLATE, 77)
    assert info["tokenizer_class"]
    codec = engine.frontend.tokenizer
    assert info["bos_token"] == codec.token_str(codec.bos_token_id)
    assert info["eos_token"] == codec.token_str(codec.eos_token_id)
    assert info["pad_token"] == "<pad>"


async def test_tokenizer_info_is_404_without_its_flag(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        answer = await served.http.get("/tokenizer_info")
    assert answer.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]
