"""safetensors and `.bin` checkpoints: single, sharded, missing, truncated, and the contents of errors."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights, loading_bar, tower_weights
from octavo_engine.wire.errors import StartupError
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "model.embed_tokens.weight": torch.randn(16, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.randn(8),
        "lm_head.weight": torch.randn(16, 8, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "ids": torch.arange(5),
    }


def folder(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_shards(path: Path, save: Any, stem: str, suffix: str) -> dict[str, torch.Tensor]:
    state = tensors()
    names, weight_map = list(state), {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save({name: state[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def assert_loads(path: Path, expected: dict[str, torch.Tensor], load_format: str = "auto") -> None:
    loaded = dict(iter_weights(resolve_model(str(path), load_format=load_format)))
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_a_single_safetensors_file_is_read(tmp_path: Path) -> None:
    save_file(tensors(), folder(tmp_path) / "model.safetensors")
    assert_loads(tmp_path, tensors())


def test_a_safetensors_file_is_read_by_its_path(tmp_path: Path) -> None:
    save_file(tensors(), folder(tmp_path) / "model.safetensors")
    assert_loads(tmp_path / "model.safetensors", tensors())


def test_sharded_safetensors_are_read(tmp_path: Path) -> None:
    assert_loads(tmp_path, write_shards(folder(tmp_path), save_file, "model", "safetensors"))


def test_sharded_bin_files_are_read(tmp_path: Path) -> None:
    assert_loads(tmp_path, write_shards(folder(tmp_path), torch.save, "pytorch_model", "bin"))


def test_a_bin_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    state = tensors()
    torch.save(state, folder(tmp_path) / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_loads(tmp_path, state)


def test_safetensors_have_precedence_unless_the_format_is_given(tmp_path: Path) -> None:
    save_file(tensors(), folder(tmp_path) / "model.safetensors")
    torch.save({"only": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert_loads(tmp_path, tensors())
    assert_loads(tmp_path, {"only": torch.ones(2)}, load_format="pt")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(folder(tmp_path), save_file, "model", "safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00002-of-00002\.safetensors: missing weight file"):
        resolve_model(str(tmp_path))


def test_a_tensor_that_only_the_index_lists_is_named(tmp_path: Path) -> None:
    state = write_shards(folder(tmp_path), save_file, "model", "safetensors")
    save_file({"model.norm.weight": state["model.norm.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(StartupError, match=r"model-00001-of-00002\.safetensors: tensor 'model.embed_tokens.weight'"):
        list(iter_weights(resolve_model(str(tmp_path))))


def test_a_truncated_safetensors_error_has_file_and_tensor(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(400)}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StartupError, match=r"model\.safetensors: truncated: tensor 'b'"):
        list(iter_weights(resolve_model(str(tmp_path))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header is incomplete"),
        (b"\x10\x00", "header is incomplete"),
        (struct.pack("<Q", 2**62) + b"{}", "header is incomplete"),
        (struct.pack("<Q", 50) + b"{}", "header is incomplete"),
        (struct.pack("<Q", 4) + b"{{{{", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 10) + b'{"a": 123}', "'a': its header entry is corrupt"),
        (struct.pack("<Q", 58) + b'{"a": {"dtype": "F9", "shape": [], "data_offsets": [0, 4]}}'[:58], "."),
    ],
)
def test_a_corrupt_safetensors_error_is_one_line_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=message) as caught:
        list(iter_weights(resolve_model(str(tmp_path))))
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}, "unsupported dtype 'F9'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes do not hold F32"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "corrupt"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}, "do not hold"),
        ({"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}, "corrupt"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "corrupt"),
    ],
)
def test_a_corrupt_safetensors_entry_error_has_the_tensor(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    header = json.dumps({"bad": entry}).encode()
    (folder(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(StartupError, match=message) as caught:
        list(iter_weights(resolve_model(str(tmp_path))))
    assert "model.safetensors: tensor 'bad'" in str(caught.value)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


@pytest.mark.parametrize("content", ["truncated", "garbage", "code", "list", "not_tensor"])
def test_a_bad_bin_error_is_one_line_with_the_file(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path) / "pytorch_model.bin"
    values = {"code": {"w": Evil()}, "list": [1], "not_tensor": {"epoch": 3}}
    torch.save(values.get(content, tensors()), path)
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    if content == "garbage":
        path.write_bytes(b"not a checkpoint")
    with pytest.raises(StartupError) as caught:
        list(iter_weights(resolve_model(str(tmp_path))))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "code ran" not in capsys.readouterr().out


def test_the_text_part_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}}
    state = {
        "language_model.model.norm.weight": torch.ones(2),
        "model.language_model.embed_tokens.weight": torch.ones(3),
        "vision_tower.x": torch.ones(4),
        "model.multi_modal_projector.y": torch.ones(5),
        "lm_head.weight": torch.ones(6),
    }
    save_file(state, folder(tmp_path, config) / "model.safetensors")
    loaded = {name: len(tensor) for name, tensor in iter_weights(resolve_model(str(tmp_path)))}
    assert loaded == {"model.norm.weight": 2, "model.embed_tokens.weight": 3, "lm_head.weight": 6}


@pytest.mark.parametrize(("text", "tower"), [("model.", "visual."), ("model.language_model.", "model.visual.")])
@pytest.mark.parametrize("is_flat", [True, False])
def test_both_layouts_of_qwen_vl_have_a_text_part_and_a_tower(
    tmp_path: Path, text: str, tower: str, is_flat: bool
) -> None:
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    config |= {} if is_flat else {"text_config": {"model_type": "qwen2_vl_text"}}
    own = ("norm.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight")
    state = {text + name: torch.ones(i) for i, name in enumerate(own, 1)} | {"lm_head.weight": torch.ones(4)}
    save_file(state | {f"{tower}x": torch.ones(5)}, folder(tmp_path, config) / "model.safetensors")
    files = resolve_model(str(tmp_path))
    loaded = {name: len(tensor) for name, tensor in iter_weights(files)}
    assert loaded == {f"model.{name}": i for i, name in enumerate(own, 1)} | {"lm_head.weight": 4}
    assert list(tower_weights(files)) == [f"{tower}x"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_has_vanished_is_a_startup_error(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path) / name
    path.touch()
    files = resolve_model(str(tmp_path))
    path.unlink()
    with pytest.raises(StartupError, match=rf"{name}: cannot be read: No such file"):
        list(iter_weights(files))


def test_the_bar_is_hidden_without_a_terminal_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(tensors(), folder(tmp_path) / "model.safetensors")
    files = resolve_model(str(tmp_path))
    with loading_bar() as progress:
        list(iter_weights(files, progress=progress))
    assert capsys.readouterr().err == ""
    with loading_bar(always=True) as progress:
        list(iter_weights(files, progress=progress))
    assert "Loading weights: " in capsys.readouterr().err


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    write_shards(folder(tmp_path), save_file, "model", "safetensors")
    files = resolve_model(str(tmp_path))
    seen: list[tuple[int, int]] = []
    list(iter_weights(files, progress=lambda done, total: seen.append((done, total))))
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert 0 < done[-1] <= seen[-1][1] == sum(path.stat().st_size for path in files.weight_files)
