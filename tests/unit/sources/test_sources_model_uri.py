"""Parsing of model names, and retries."""

from pathlib import Path

import pytest
from octavo_engine.sources.model_uri import download_folder, locate_local, parse_hub_uri
from octavo_engine.sources.retries import MAX_TRIES, Interrupted, Unreachable, pause_after, with_retries
from octavo_engine.wire.errors import StartupError


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("org/m", ("hf", "org/m", None)),
        ("hf://org/m", ("hf", "org/m", None)),
        ("hf://org/m/Q4/m.gguf", ("hf", "org/m", "Q4/m.gguf")),
        ("org/m:Q4_K_M", ("hf", "org/m", "*Q4_K_M*.gguf")),
        ("ms://org/m", ("ms", "org/m", None)),
    ],
)
def test_hub_uris_are_parsed(model: str, place: tuple[str, str, str | None]) -> None:
    assert parse_hub_uri(model) == place


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StartupError, match=r"unknown source 'gcs://': use hf://, ms://, s3://, gs://, az://, pvc://"):
        parse_hub_uri("gcs://bucket/m")


def test_claims_are_located_below_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CLAIMS", str(tmp_path))
    (tmp_path / "weights" / "llama").mkdir(parents=True)
    assert locate_local("pvc://weights/llama") == tmp_path / "weights" / "llama"
    assert locate_local("pvc://weights") == tmp_path / "weights"
    assert locate_local("pvc://weights//llama") == tmp_path / "weights" / "llama"
    with pytest.raises(StartupError, match=r"the claim other is not mounted here: .*/other is not a folder"):
        locate_local("pvc://other/llama")
    with pytest.raises(StartupError, match="no such file or folder in the claim weights"):
        locate_local("pvc://weights/qwen")
    for outside in ("pvc://weights/../..", "pvc://../x"):
        with pytest.raises(StartupError, match=r"without '\.\.'"):
            locate_local(outside)


def test_each_uri_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    folders = {download_folder(uri) for uri in ("s3://b/a/b", "s3://b/a-b", "s3://b/a/b/", "s3://b/" + "x" * 500)}
    assert len(folders) == 4
    assert {folder.parent for folder in folders} == {Path("/cache/octavo/models")}
    assert max(len(folder.name) for folder in folders) < 100


def test_attempts_are_counted_since_the_last_progress() -> None:
    reached, pauses = [0], list[float]()

    def act() -> str:
        reached[0] += len(pauses) == 3  # the fourth attempt makes progress
        if len(pauses) < 7:
            raise Interrupted("cut off")
        return "done"

    assert with_retries(act, "m", progress=lambda: reached[0], pause=pauses.append) == "done"
    assert len(pauses) == 7
    assert pauses[3] <= 1 < max(pauses)


def test_attempts_are_limited() -> None:
    tries = list[float]()

    def act() -> None:
        raise Interrupted("the hub returned 503")

    with pytest.raises(Unreachable, match=r"m: the hub returned 503 \(6 attempts\): check the network"):
        with_retries(act, "m", pause=tries.append)
    assert len(tries) == MAX_TRIES - 1


@pytest.mark.parametrize(("tries", "longest"), [(1, 1), (2, 2), (5, 16), (9, 30)])
def test_pauses_grow_to_a_limit(tries: int, longest: float) -> None:
    assert all(longest / 2 <= pause_after(tries) <= longest for _ in range(50))
