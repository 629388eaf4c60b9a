"""The selection of a repository's files: one format, its configuration, and no GGUF that was not requested."""

import pytest
from octavo_engine.sources.file_selection import select_files
from octavo_engine.wire.errors import StartupError

METADATA = {"config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja"} | {
    "additional_chat_templates/tool_use.jinja"
}
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
NOISE = {
    "README.md",
    ".gitattributes",
    ".cache.json",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "onnx/config.json",
    "old/additional_chat_templates/rag.jinja",
    "additional_chat_templates/old/rag.jinja",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "optimizer.bin",
}
GGUFS = {"m-Q4_K_M.gguf", "m-Q8_0.gguf"}
SPLIT = {"Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf"}


@pytest.mark.parametrize(
    ("names", "load_format", "file", "wanted", "main"),
    [
        (METADATA | SHARDS | NOISE | {"pytorch_model.bin", "m.gguf"}, "auto", None, METADATA | SHARDS, None),
        (METADATA | SHARDS | {"pytorch_model.bin"}, "pt", None, METADATA | {"pytorch_model.bin"}, None),
        (
            {"config.json", "pytorch_model.bin", "optimizer.bin"},
            "auto",
            None,
            {"config.json", "pytorch_model.bin"},
            None,
        ),
        ({"config.json", "m.Q4.gguf"}, "auto", None, {"config.json", "m.Q4.gguf"}, None),
        ({"m.gguf", "mmproj-m.gguf"}, "auto", None, {"m.gguf"}, None),
        (SPLIT, "auto", None, SPLIT, None),
        (
            METADATA | SHARDS | NOISE | {"adapter_config.json"},
            "adapter",
            None,
            {"adapter_config.json", "adapter_model.safetensors"},
            None,
        ),
        (METADATA | SHARDS, "dummy", None, METADATA, None),
        (GGUFS | METADATA, "auto", "*Q8*.gguf", {"m-Q8_0.gguf"}, "m-Q8_0.gguf"),
        (SPLIT | GGUFS, "auto", "Q4/*.gguf", SPLIT, "Q4/m-00001-of-00002.gguf"),
        (SPLIT | GGUFS, "auto", "Q4/m-00002-of-00002.gguf", SPLIT, "Q4/m-00001-of-00002.gguf"),
    ],
)
def test_the_right_files_are_selected(
    names: set[str], load_format: str, file: str | None, wanted: set[str], main: str | None
) -> None:
    found = select_files("hf://org/m", names, load_format=load_format, file=file)
    assert set(found.names) == wanted
    assert len(found.names) == len(wanted)
    assert found.main == main


@pytest.mark.parametrize(
    ("names", "load_format", "file", "message"),
    [
        ({"config.json"}, "auto", None, "hf://org/m: found no weights (*.safetensors, pytorch_model*.bin or *.gguf)."),
        ({"config.json", "m.gguf"}, "pt", None, "hf://org/m: found no weights in the format pt."),
        (
            GGUFS,
            "auto",
            None,
            "there are several GGUF files: choose one as hf://org/m/FILE: m-Q4_K_M.gguf, m-Q8",
        ),
        (GGUFS, "auto", "*.gguf", "'*.gguf' matches several GGUF files: choose one of m-Q4_K_M.gguf, m-Q8_0.gguf."),
        (GGUFS, "auto", "*Q9*.gguf", "no GGUF file matches '*Q9*.gguf'."),
    ],
)
def test_an_impossible_selection_is_refused(names: set[str], load_format: str, file: str | None, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        select_files("hf://org/m", names, load_format=load_format, file=file)
    assert message in str(caught.value)
