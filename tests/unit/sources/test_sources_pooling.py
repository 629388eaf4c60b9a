"""Models that answer with vectors, and their pooling: from `modules.json`, `1_Pooling/config.json` and settings."""

import json

import pytest
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.sources.file_selection import select_files
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.wire.errors import StartupError
from octavo_testing.scripted import write_byte_model

LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
KINDS = ("Transformer", "Pooling", "Normalize")


@pytest.fixture
def folder(tmp_path):
    return write_byte_model(tmp_path)


def write_modules(folder, pooling=LAST, kinds=KINDS):
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def set_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def pooling_of(folder, **arguments):
    config = resolve_config(model=str(folder), load_format="dummy", **arguments)
    return load_served_model(config, resolve_files(config)).pooling


def test_causal_model_generates_unless_asked(folder):
    assert pooling_of(folder) is None
    assert pooling_of(folder, runner="generate") is None
    assert pooling_of(folder, runner="pooling").normalize


@pytest.mark.parametrize("argument", [{"task": "embed"}, {"task": "embedding"}, {"convert": "embed"}])
def test_vllms_other_names_of_the_runner(folder, argument):
    assert pooling_of(folder, **argument) is not None
    with pytest.raises(StartupError, match="contradict"):
        pooling_of(folder, runner="generate", **argument)


def test_modules_make_an_embedding_model(folder):
    write_modules(folder)
    assert pooling_of(folder).normalize
    assert pooling_of(folder, runner="generate") is None


@pytest.mark.parametrize("pooling", [LAST, {"pooling_mode": "lasttoken"}])
def test_normalising_comes_from_the_modules(folder, pooling):
    write_modules(folder, pooling, KINDS[:2])
    assert not pooling_of(folder).normalize
    assert pooling_of(folder, pooler_config={"use_activation": True}).normalize
    assert pooling_of(folder, pooler_config='{"normalize": true, "seq_pooling_type": "last"}').normalize


@pytest.mark.parametrize(
    ("pooling", "name"),
    [({"pooling_mode_mean_sqrt_len_tokens": True}, "MEAN_SQRT_LEN"), ({"pooling_mode": "max"}, "MAX")],
)
def test_other_poolings_are_refused(folder, pooling, name):
    write_modules(folder, pooling)
    with pytest.raises(StartupError, match=f"pooling {name} .*--pooler-config"):
        pooling_of(folder)
    assert pooling_of(folder, pooler_config={"pooling_type": "LAST"}).normalize


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [(LAST, "LAST"), ({"pooling_mode_mean_tokens": True}, "MEAN"), ({"pooling_mode": "cls"}, "CLS")],
)
def test_kind_comes_from_the_modules(folder, pooling, kind):
    write_modules(folder, pooling)
    assert pooling_of(folder).kind == kind
    assert pooling_of(folder, pooler_config={"pooling_type": "MEAN"}).kind == "MEAN"


def test_a_mean_without_the_instruction_is_refused(folder):
    write_modules(folder, {"pooling_mode_mean_tokens": True, "include_prompt": False})
    with pytest.raises(StartupError, match="include_prompt"):
        pooling_of(folder)


@pytest.mark.parametrize("pooling", [{}, LAST | {"pooling_mode_cls_token": True}])
def test_no_pooling_or_several_are_refused(folder, pooling):
    write_modules(folder, pooling)
    with pytest.raises(StartupError, match=r"1_Pooling/config.json: chooses [02] poolings"):
        pooling_of(folder)


def test_further_layers_are_refused(folder):
    write_modules(folder, kinds=(*KINDS, "Dense"))
    with pytest.raises(StartupError, match="module Dense"):
        pooling_of(folder)


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON"])
def test_broken_modules_are_refused(folder, text):
    (folder / "modules.json").write_text(text)
    with pytest.raises(StartupError, match=r"modules\.json"):
        pooling_of(folder)


@pytest.mark.parametrize("key", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_decoders_are_refused(folder, key):
    set_config(folder, **key)
    with pytest.raises(StartupError, match=f"{next(iter(key))}.*causal attention"):
        pooling_of(folder, runner="pooling")


def test_dimensions_come_from_config_or_overrides(folder):
    assert not pooling_of(folder, runner="pooling").is_matryoshka
    assert pooling_of(folder, runner="pooling", hf_overrides='{"is_matryoshka": true}').is_matryoshka
    set_config(folder, matryoshka_dimensions=[4, 8])
    found = pooling_of(folder, runner="pooling")
    assert (found.is_matryoshka, found.matryoshka_dimensions) == (True, (4, 8))


@pytest.mark.parametrize(
    "arguments",
    [
        {"pooler_config": {"pooling_type": "STEP"}},
        {"pooler_config": {"step_tag_id": 3}},
        {"pooler_config": "LAST"},
        {"hf_overrides": "[]"},
        {"hf_overrides": {"matryoshka_dimensions": [0]}},
        {"task": "score"},
        {"runner": "draft"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"enable_lora": True},
        {"runner": "generate", "pooler_config": {"use_activation": False}},
    ],
)
def test_wrong_settings_are_refused(folder, arguments):
    with pytest.raises(StartupError):
        pooling_of(folder, **{"runner": "pooling", **arguments})


def test_downloads_include_the_pooling():
    names = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "onnx/config.json"]
    found = select_files("hf://x/y", names, load_format="auto").names
    assert set(names) - set(found) == {"onnx/config.json"}
