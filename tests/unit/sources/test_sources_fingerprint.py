"""The fingerprint covers only content: it is independent of paths, changes with any real change, and is fast."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from octavo_engine.sources import fingerprint
from octavo_engine.sources.fingerprint import weights_fingerprint
from octavo_engine.sources.resolve import resolve_model

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "rope_theta": 1e4}
BYTES = bytes(range(256)) * 64


def make(path: Path, data: bytes = BYTES, config: dict[str, Any] = CONFIG, name: str = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / name).write_bytes(data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def of(path: Path, load_format: str = "auto") -> str:
    return weights_fingerprint(resolve_model(str(path), load_format=load_format))


def test_weights_that_are_quantised_while_they_load_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    files = resolve_model(str(make(tmp_path / "a")))
    found = [weights_fingerprint(files, quantization) for quantization in ("int8", "int4", None, "gguf")]  # type: ignore[arg-type]
    assert len(set(found)) == 3
    assert found[2] == found[3]


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "HEAD_BYTES", 64)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 16)


def test_the_fingerprint_ignores_path_and_file_name(tmp_path: Path) -> None:
    first = of(make(tmp_path / "a"))
    assert first == of(make(tmp_path / "deep" / "b", name="renamed.safetensors"))
    assert len(bytes.fromhex(first)) == 32


def test_the_fingerprint_ignores_unrelated_config_keys(tmp_path: Path) -> None:
    written = {"transformers_version": "9", "_name_or_path": "/x", **dict(reversed(CONFIG.items()))}
    assert of(make(tmp_path / "a")) == of(make(tmp_path / "b", config=written))


@pytest.mark.parametrize(
    ("data", "config"),
    [
        (BYTES + b"x", CONFIG),
        (BYTES[:-1], CONFIG),
        (b"\xff" + BYTES[1:], CONFIG),
        (BYTES[:-1] + b"\x00", CONFIG),
        (BYTES, {**CONFIG, "rope_theta": 2e4}),
        (BYTES, {**CONFIG, "hidden_size": 16}),
    ],
)
def test_every_change_changes_the_fingerprint(tmp_path: Path, data: bytes, config: dict[str, Any]) -> None:
    assert of(make(tmp_path / "a")) != of(make(tmp_path / "b", data, config))


def test_the_order_of_shards_does_not_matter(tmp_path: Path) -> None:
    for folder, names in (("a", "12"), ("b", "21")):
        path = make(tmp_path / folder)
        (path / "model.safetensors").unlink()
        for number, content in zip(names, (b"one", b"two"), strict=True):
            (path / f"model-0000{number}-of-00002.safetensors").write_bytes(content)
    assert of(tmp_path / "a") == of(tmp_path / "b")


@pytest.mark.usefixtures("small_samples")
def test_samples_reach_from_the_head_to_the_last_byte(tmp_path: Path) -> None:
    samples = fingerprint._samples(len(BYTES))
    assert samples[0] == (0, 64)
    assert samples[1][0] == 64
    assert sum(samples[-1]) == len(BYTES)
    assert len(samples) == 1 + fingerprint.NUM_SAMPLES
    gaps = [b[0] - a[0] for a, b in pairwise(samples[1:])]
    assert max(gaps) - min(gaps) <= 1
    shifted = bytes((byte + 1) % 256 for byte in BYTES)
    finetuned = BYTES[:64] + shifted[64:]
    assert of(make(tmp_path / "a")) != of(make(tmp_path / "b", finetuned))


def test_a_dummy_fingerprint_depends_only_on_the_config(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b", b"other")
    assert of(first, "dummy") == of(second, "dummy") != of(first)


def test_a_huge_checkpoint_is_read_in_samples(tmp_path: Path) -> None:
    """The checkpoint has twenty sparse files of 5 GB."""
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for number in range(1, 21):
        with (folder / f"model-{number:05}-of-00020.safetensors").open("wb") as file:
            file.truncate(5_000_000_000)
    before = psutil.Process().io_counters().read_chars
    of(folder)
    assert psutil.Process().io_counters().read_chars - before < 100_000_000
