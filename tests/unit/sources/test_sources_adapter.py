"""Adapters on disk: scales of modules, and a refusal of everything that is broken or is no plain LoRA."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import octavo_engine.sources.adapter
import pytest
import torch
from octavo_engine.sources.adapter import read_adapter
from octavo_engine.wire.errors import StartupError
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.counted_work import count_steps

Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        read_adapter(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (1.0, 1.0)),
        ({"lora_alpha": 4}, (0.5, 0.5)),
        ({"lora_alpha": 4, "use_rslora": True}, (4 / 8**0.5, 4 / 8**0.5)),
        ({"alpha_pattern": {"q_proj": 2}}, (0.25, 1.0)),
        ({"alpha_pattern": {r".*\.0\..*o_proj": 2, "o_proj": 4}}, (1.0, 0.25)),
        ({"alpha_pattern": {"proj": 2}}, (1.0, 1.0)),
        ({"alpha_pattern": {r".*layers\.[0-9]+\.(self_attn|mlp)\.(q|k|v)_proj": 2}}, (0.25, 1.0)),
        ({"alpha_pattern": {r"(?:self_attn\.)?q_proj": 2, r"[ok(]_proj": 4}}, (0.25, 0.5)),
        ({"r": 99, "rank_pattern": {"q_proj": 8, "o_proj": 8}}, (1.0, 1.0)),
    ],
    ids=str,
)
def test_scales_follow_patterns_and_rslora(tmp_path: Path, settings: dict[str, Any], scales: tuple[float, ...]) -> None:
    pairs = llama_pairs("self_attn.q_proj", "self_attn.o_proj")
    modules = read_adapter(write_adapter(tmp_path / "a", pairs, **settings)).modules
    assert (modules[Q].scale, modules[OUT].scale) == pytest.approx(scales)
    assert modules[Q].rank == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "'loftq'"),
        ({"r": 4}, "gives it rank 4"),
        ({"r": None}, "r of 'model.layers.0.self_attn.q_proj' is None"),
        ({"r": 8.5}, "rank 8.5"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"alpha_pattern": {"(": 3}}, "invalid pattern '('"),
        ({"r": 10**400}, "must be a number"),
        ({"lora_alpha": -(10**400)}, "must be a number"),
    ],
    ids=str,
)
def test_settings_that_need_more_than_plain_lora_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    assert words in refusal(write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"), **settings))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{Q}.lora_magnitude_vector", "lora_magnitude_vector"),
        (f"{Q}.bias", "no part of plain LoRA"),
        ("model.embed_tokens.lora_embedding_A", "trains embeddings"),
        ("model.embed_tokens.base_layer.weight", "grown vocabulary"),
        ("lm_head.weight", "grown vocabulary"),
        (f"{OUT}.lora_A.weight", "o_proj.lora_B.weight' is missing"),
        (f"{OUT}.lora_B.weight", "o_proj.lora_A.weight' is missing"),
    ],
)
def test_tensors_that_are_no_plain_lora_are_refused(tmp_path: Path, name: str, words: str) -> None:
    assert words in refusal(
        write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"), tensors={name: torch.zeros(8, 64)})
    )


def test_tensors_of_other_types_and_dimensions_are_refused(tmp_path: Path) -> None:
    pairs = llama_pairs("self_attn.q_proj")
    a, b = pairs[Q]
    assert "type I8" in refusal(write_adapter(tmp_path / "a", pairs | {Q: (a.to(torch.int8), b)}))
    assert "(8, 64, 1)" in refusal(write_adapter(tmp_path / "b", pairs | {Q: (a[:, :, None], b)}))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert "no such folder" in refusal(folder)
    write_adapter(folder, llama_pairs("self_attn.q_proj"))
    tensors, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    assert "truncated" in refusal(folder)
    tensors.write_bytes(whole[:100])
    assert "header" in refusal(folder)
    tensors.unlink()
    assert "cannot be read" in refusal(folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "safe_serialization=True" in refusal(folder)
    settings.write_text("[]")
    assert "must hold an object" in refusal(folder)
    settings.write_text("{")
    assert "not valid JSON" in refusal(folder)
    settings.unlink()
    assert "cannot be read" in refusal(folder)


#: Patterns that run for years on names of 100 letters, or match in so many ways.
SLOW = [
    *(r"(([a-z]|[a-z.0-9_])+)+X", r"(a|a)*X", r"(.*)*X", r"(a+)+X", r"(?:a*){2,}X", r"(?:a|aa)+X", r"(\w+\.?)+X"),
    *(r".*.*.*.*X", r"a?a?a?a?a?a?a?a?a?a?X", r"(a|a)" * 40 + "X", r"((a|a)(a|a)){9}X", r"(?x:(a+) +)X", r"[)](a+)+X"),
    *(r"\((a+)+X", "a" * 300, r"(a{1,9}){9}X", r"a{0,99}a{0,99}a{0,99}a{0,99}X"),
    *("(?x:(a+)#\n+)X", "(?x:(a+)#)\n{1,99})X", "(?P<n>a+)X", r"(a+)(?=a)X", "(|.)" * 25 + "X", "(?:|.)" * 25 + "X"),
]


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_may_run_for_long_are_refused(tmp_path: Path, key: str, pattern: str) -> None:
    pairs = {"a" * 100: llama_pairs("self_attn.q_proj")[Q]}
    assert "may run for long" in refusal(write_adapter(tmp_path / "a", pairs, **{key: {pattern: 8}}))


def test_many_patterns_are_matched_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_engine.sources.adapter, "MAX_MATCHING_S", -1)
    folder = write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"), rank_pattern={"x": 8})
    assert "rank_pattern takes longer" in refusal(folder)


HUGE = 10_000_000_000


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"shape": [1] * 9, "data_offsets": [0, 4]}, "9 dimensions"),
        ({"shape": [HUGE] * 500_000, "data_offsets": [0, 4]}, "longer than 4194304 bytes"),
        ({"shape": [HUGE] * 300_000, "data_offsets": [0, 4]}, "300000 dimensions"),
        ({"shape": [2**24, 2**25], "data_offsets": [0, 4]}, "2^48 elements"),
        ({"shape": [10**4000, 1], "data_offsets": [0, 4]}, "entry is corrupt"),
        ({"shape": [1, 1], "data_offsets": [10**4000, 10**4000 + 4]}, "entry is corrupt"),
        ({"shape": [8, 1], "data_offsets": [0, 32], "x": "[" * 4_300_000}, "longer than 4194304 bytes"),
        ("[" * 100_000 + "]" * 100_000, "not JSON"),
    ],
    ids=["dimensions", "long", "many dimensions", "elements", "digits", "digits of offsets", "text", "depth"],
)
def test_hostile_headers_are_refused_soon(tmp_path: Path, entries: dict[str, Any] | str, words: str) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"))
    tensor = entries if isinstance(entries, str) else json.dumps({"dtype": "F32", **entries})
    header = f'{{"base_model.model.x.lora_A.weight": {tensor}}}'.encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    with count_steps() as steps:
        assert words in refusal(folder)
    assert steps.count < 10 * 300_000  # no more than the checks of each number


def test_hostile_settings_are_refused_soon(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"))
    (folder / "adapter_config.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "not valid JSON" in refusal(folder)
    (folder / "adapter_config.json").write_text('{"x": "' + "a" * 5_000_000 + '"}')
    assert "more than 4194304" in refusal(folder)


def test_a_module_with_a_long_name_is_refused(tmp_path: Path) -> None:
    pairs = {"a" * 129: llama_pairs("self_attn.q_proj")[Q]}
    assert "exceeds 128 characters" in refusal(write_adapter(tmp_path / "a", pairs))


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "no tensors" in refusal(write_adapter(tmp_path / "a", {}))


def test_settings_without_effect_are_accepted(tmp_path: Path) -> None:
    settings = {"lora_dropout": 0.1, "target_modules": "all-linear", "fan_in_fan_out": True, "use_dora": False}
    folder = write_adapter(tmp_path / "a", llama_pairs("self_attn.q_proj"), **settings, init_lora_weights="gaussian")
    assert json.loads((folder / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    assert len(read_adapter(folder).modules) == 2


def test_a_read_that_may_hang_is_logged_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*args: Any, **options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(octavo_engine.sources.adapter, "read_json_object", hang)
    with caplog.at_level(logging.INFO), pytest.raises(InterruptedError):
        read_adapter(tmp_path)
    assert str(tmp_path) in caplog.text
