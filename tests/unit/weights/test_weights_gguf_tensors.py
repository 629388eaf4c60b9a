"""Blocks that llama.cpp itself encoded and decoded, and types that cannot be decoded."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.weights import gguf_tensors
from octavo_engine.weights.gguf_tensors import interleaved_rows, read_gguf_tensor
from octavo_engine.wire.errors import StartupError

BLOCKS = json.loads((Path(__file__).parent / "llama_cpp_blocks.json").read_text())
TYPES = [name for name in BLOCKS if not name.startswith("_")]
COLUMNS = 256


def write_rows(path: Path, qtype: str, rows: bytes) -> None:
    kind = GGMLQuantizationType[qtype]
    row_bytes = gguf.quant_shape_to_byte_shape((COLUMNS,), kind)[0]
    data = np.frombuffer(rows, dtype=np.uint8).reshape(-1, row_bytes)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones(3, dtype=np.float32))
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_rows(path: Path, **options: Any) -> torch.Tensor:
    with path.open("rb") as file:
        return read_gguf_tensor(path, file, read_gguf(path).tensors["w"], **options)


def case(qtype: str) -> tuple[bytes, torch.Tensor]:
    values = np.frombuffer(bytes.fromhex(BLOCKS[qtype]["values"]), dtype="<f4")
    return bytes.fromhex(BLOCKS[qtype]["blocks"]), torch.from_numpy(values.copy())


@pytest.mark.parametrize("qtype", TYPES)
def test_dequantised_values_equal_llama_cpp(tmp_path: Path, qtype: str) -> None:
    blocks, expected = case(qtype)
    write_rows(tmp_path / "m.gguf", qtype, blocks * 3)
    assert torch.equal(read_rows(tmp_path / "m.gguf"), expected.expand(3, COLUMNS))


def test_the_table_covers_the_required_types() -> None:
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"} <= set(TYPES)


@pytest.mark.parametrize("slice_bytes", [1, COLUMNS * 4 * 2, 1 << 20])
def test_slices_and_scattered_rows_give_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    blocks, _ = case("Q8_0")
    rolled = [blocks[i * 34 :] + blocks[: i * 34] for i in range(8)]
    write_rows(tmp_path / "m.gguf", "Q8_0", b"".join(rolled))
    plain = read_rows(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_tensors, "SLICE_BYTES", slice_bytes)
    done: list[int] = []
    rows = interleaved_rows(8, heads=2)
    scattered = read_rows(tmp_path / "m.gguf", rows=rows, advance=done.append)
    assert torch.equal(scattered[rows], plain)
    assert sum(done) == len(blocks) * 8
    assert len(done) == {1: 8, COLUMNS * 4 * 2: 4, 1 << 20: 1}[slice_bytes]


def test_interleaved_rows_match_a_manual_example() -> None:
    """Two heads of six rows are stored as a0 b0 a1 b1 a2 b2 and expected as a0 a1 a2 b0 b1 b2."""
    assert interleaved_rows(12, heads=2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(("qtype", "row_bytes"), [("Q8_K", 292), ("I8", 256), ("Q8_1", 320)])
def test_a_type_without_decoder_is_named(tmp_path: Path, qtype: str, row_bytes: int) -> None:
    write_rows(tmp_path / "m.gguf", qtype, bytes(row_bytes))
    with pytest.raises(StartupError, match=rf"m\.gguf: tensor 'w' has the GGUF type {qtype}"):
        read_rows(tmp_path / "m.gguf")


def test_bfloat16_and_float16_keep_their_dtype_by_default(tmp_path: Path) -> None:
    values = torch.randn(2, COLUMNS)
    for qtype, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        path = tmp_path / f"{qtype}.gguf"
        write_rows(path, qtype, values.to(dtype).view(torch.uint8).numpy().tobytes())
        assert torch.equal(read_rows(path), values.to(dtype))
        assert torch.equal(read_rows(path, dtype=torch.float32), values.to(dtype).float())
