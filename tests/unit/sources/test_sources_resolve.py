"""Forms of model names, the chosen files, and the errors if there is no choice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def make_folder(path: Path, *names: str, config: dict[str, Any] | None = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).touch()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"))
    return path


@pytest.mark.parametrize(
    ("names", "load_format", "chosen", "found"),
    [
        (["model.safetensors", "pytorch_model.bin"], "auto", ["model.safetensors"], "safetensors"),
        (["model.safetensors", "pytorch_model.bin"], "pt", ["pytorch_model.bin"], "pt"),
        (["pytorch_model.bin", "training_args.bin"], "auto", ["pytorch_model.bin"], "pt"),
        (["model.safetensors", "consolidated.safetensors"], "auto", ["model.safetensors"], "safetensors"),
        (["fine.safetensors", "adapter_model.safetensors"], "auto", ["fine.safetensors"], "safetensors"),
        (["a-00001-of-00002.bin", "a-00002-of-00002.bin"], "auto", None, "pt"),
        (["model.safetensors"], "dummy", [], "dummy"),
        ([], "dummy", [], "dummy"),
    ],
)
def test_the_right_weight_files_are_chosen(
    tmp_path: Path, names: list[str], load_format: str, chosen: list[str] | None, found: str
) -> None:
    files = resolve_model(str(make_folder(tmp_path / "m", *names)), load_format=load_format)
    assert [path.name for path in files.weight_files] == (sorted(names) if chosen is None else chosen)
    assert files.load_format == found
    assert files.config == CONFIG


@pytest.mark.parametrize(
    ("names", "load_format", "message"),
    [
        ([], "auto", "no weights (*.safetensors, pytorch_model*.bin or *.gguf) in this folder"),
        (["pytorch_model.bin"], "safetensors", "no *.safetensors weights in this folder"),
        (["model.safetensors"], "pt", "no PyTorch weights (*.bin) in this folder"),
        (["a.safetensors", "b.safetensors"], "auto", "more than one weight file: choose one as the model: a.saf"),
        (["a.gguf", "b.gguf"], "auto", "more than one weight file"),
        (["m-00001-of-00002.safetensors"], "auto", "m-00002-of-00002.safetensors: missing weight file"),
        (["m-00002-of-00002.gguf"], "auto", "m-00001-of-00002.gguf: missing weight file"),
        (["model.safetensors"], "tensorizer", "load format 'tensorizer' is unknown"),
    ],
)
def test_an_impossible_choice_is_refused(tmp_path: Path, names: list[str], load_format: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_model(str(make_folder(tmp_path / "m", *names)), load_format=load_format)
    assert message in str(caught.value)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"w": "../x.safetensors"}}'])
def test_a_bad_index_is_named(tmp_path: Path, index: str) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match=r"model\.safetensors\.index\.json: "):
        resolve_model(str(folder))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json beside the weights"):
        resolve_model(str(make_folder(tmp_path / "m", "model.safetensors", config=None)))


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "model.safetensors")
    (folder / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json: not valid JSON"):
        resolve_model(str(folder))


@pytest.mark.parametrize("method", ["modelopt", "quark", "mxfp4"])
def test_a_quantised_checkpoint_is_refused_by_method(tmp_path: Path, method: str) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method}}
    with pytest.raises(StartupError, match=f"quantisation method '{method}'"):
        resolve_model(str(make_folder(tmp_path / "m", "model.safetensors", config=config)))


def test_the_settings_of_an_old_gptq_checkpoint_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "model.safetensors")
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "sym": true, "desc_act": false}')
    assert resolve_model(str(folder)).quantisation == QuantisedConfig(
        bits=4, group_size=128, symmetric=True, zero_offset=1, method="gptq", layout="gptq"
    )


def test_a_gguf_is_found_as_file_and_as_folder(gguf_file: Path) -> None:
    for model in (str(gguf_file), str(gguf_file.parent), f"file://{gguf_file}"):
        files = resolve_model(model)
        assert files.name == model
        assert files.gguf == gguf_file
        assert files.weight_files == (gguf_file,)
        assert files.config["architectures"] == ["Qwen2ForCausalLM"]
    dummy = resolve_model(str(gguf_file), load_format="dummy")
    assert (dummy.load_format, dummy.weight_files) == ("dummy", ())
    assert dummy.config == files.config


def test_a_single_gguf_ignores_other_files_of_its_folder(gguf_file: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "downloads", "tokenizer.json")
    copy = folder / "tiny.gguf"
    copy.write_bytes(gguf_file.read_bytes())
    assert resolve_model(str(copy)).tokenizer_json is None
    assert resolve_model(str(folder), load_format="gguf").tokenizer_json == folder / "tokenizer.json"


def test_a_wrong_load_format_for_a_file_is_refused(gguf_file: Path) -> None:
    with pytest.raises(StartupError, match="is not a safetensors file"):
        resolve_model(str(gguf_file), load_format="safetensors")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": '{"chat_template": [7, {"name": "default", "template": "D"}, {}]}'}, "D"),
        ({"tokenizer_config.json": '{"chat_template": {"default": "D", "rag": 7}}'}, "D"),
        ({}, None),
        ({"tokenizer_config.json": '{"chat_template": "T"}'}, "T"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "D"}]}'}, "D"),
        ({"tokenizer_config.json": '{"chat_template": "T"}', "chat_template.jinja": "J"}, "J"),
        ({"tokenizer_config.json": "{}", "chat_template.json": '{"chat_template": "C"}'}, "C"),
    ],
)
def test_the_chat_template_is_found_in_every_place(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    folder = make_folder(tmp_path / "m", "model.safetensors", "tokenizer.json")
    for name, content in files.items():
        (folder / name).write_text(content)
    found = resolve_model(str(folder))
    assert (found.chat_template, found.named_chat_templates) == (expected, {})
    assert found.tokenizer_json == folder / "tokenizer.json"


NAMED = '{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}'
ADDED = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("files", "default", "named"),
    [
        ({"tokenizer_config.json": NAMED}, "D", {"tool_use": "T"}),
        ({"chat_template.json": NAMED}, "D", {"tool_use": "T"}),
        ({"chat_template.jinja": "J", ADDED: "A"}, "J", {"tool_use": "A"}),
        ({"tokenizer_config.json": NAMED, "chat_template.jinja": "J"}, "J", {}),
        ({"tokenizer_config.json": NAMED, ADDED: "A"}, "D", {"tool_use": "A"}),
        ({ADDED: "A", "additional_chat_templates/notes.txt": "x"}, None, {"tool_use": "A"}),
    ],
)
def test_named_chat_templates_are_found(tmp_path: Path, files: dict[str, str], default: str | None, named: Any) -> None:
    folder = make_folder(tmp_path / "m", "model.safetensors", "tokenizer.json")
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    found = resolve_model(str(folder))
    assert (found.chat_template, found.named_chat_templates) == (default, named)


def test_named_chat_templates_of_a_gguf_are_found(tmp_path: Path) -> None:
    path, given = tmp_path / "tiny.gguf", [("default", "D"), ("tool_use", "T")]
    templates = [{"name": name, "template": text} for name, text in given]
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"), chat_templates=templates)
    found = resolve_model(str(path))
    assert (found.chat_template, found.named_chat_templates) == ("D", {"tool_use": "T"})
    make_folder(tmp_path, "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("J")
    found = resolve_model(str(tmp_path), load_format="gguf")
    assert (found.chat_template, found.named_chat_templates) == ("J", {})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model", "/nowhere/model: there is no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("model.gguf", "no such file or folder"),
        ("file:///nowhere", "no such file or folder"),
        ("gcs://bucket/model", "unknown source 'gcs://'"),
        ("two words", "two words: this is neither a local path nor a Hugging Face model id"),
        ("org/absent-model", "org/absent-model: not in the local Hugging Face cache, and the hub cannot be reached"),
        ("hf://org/absent-model", "org/absent-model: not in the local"),
        ("org/absent-model:Q4_K_M", "org/absent-model: not in the local"),
    ],
)
def test_a_model_that_cannot_be_found_is_refused(model: str, message: str) -> None:
    """The suite runs with HF_HUB_OFFLINE=1."""
    with pytest.raises(StartupError) as caught:
        resolve_model(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    with pytest.raises(StartupError, match="not a weight file"):
        resolve_model(str(tmp_path / "notes.md"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fill the cache of the real client, which the suite keeps offline."""

    def fill(repo: str, *sources: Path) -> Path:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        root = tmp_path / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        for source in sources:
            (snapshot / source.name).write_bytes(source.read_bytes())
        return snapshot

    return fill


def test_a_cached_model_is_found_offline(hub_cache, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "m", "model.safetensors")
    snapshot = hub_cache("org/m", source / "model.safetensors", source / "config.json")
    for model in ("org/m", "hf://org/m"):
        files = resolve_model(model)
        assert (files.name, files.root, files.load_format) == (model, snapshot, "safetensors")
        assert fetched_revision(files.root) == "0" * 40
    assert fetched_revision(resolve_model(str(source)).root) == ""
    with pytest.raises(StartupError, match="org/m: not in the local"):
        resolve_model("org/m", revision="v2")


@pytest.mark.parametrize("model", ["org/g", "hf://org/g/tiny.gguf", "org/g:tiny"])
def test_a_cached_gguf_is_found_offline(hub_cache, gguf_file: Path, model: str) -> None:
    snapshot = hub_cache("org/g", gguf_file)
    assert resolve_model(model).gguf == snapshot / gguf_file.name


def test_model_scope_without_its_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(StartupError, match=r"pip install 'octavo-engine\[modelscope\]'"):
        resolve_model("ms://org/m")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(StartupError, match="ModelScope"):
        resolve_model("org/m")


def test_resolving_imports_no_heavy_package() -> None:
    """The API process resolves models too: it must not pay for torch, transformers or numpy."""
    code = (
        "import importlib, pkgutil, sys, octavo_engine.sources as s\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(s.__path__, s.__name__ + '.')]\n"
        "clients = {'huggingface_hub', 'obstore', 'botocore', 'tqdm'}\n"
        "heavy = ({'torch', 'transformers', 'numpy', 'gguf', 'safetensors'} | clients) & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
