"""Parsing of model names, AWS profiles, and retries."""

from pathlib import Path

import pytest
from octavo_engine.sources.aws_profile import profile_options
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


CREDENTIALS = "[default]\naws_access_key_id = A\naws_secret_access_key = B\n[work]\naws_access_key_id = C\n"
CONFIG = "[default]\nregion = eu-west-1\n[profile work]\nendpoint_url = https://minio\n[profile sso]\nsso_session = x\n"


@pytest.fixture
def aws_home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    return {"HOME": str(tmp_path)}


def test_aws_profiles_are_read(aws_home: dict[str, str], tmp_path: Path) -> None:
    assert profile_options({}) == {}
    assert profile_options(aws_home) == {"access_key_id": "A", "secret_access_key": "B", "region": "eu-west-1"}
    assert profile_options(aws_home | {"AWS_PROFILE": "work"}) == {"access_key_id": "C", "endpoint": "https://minio"}
    assert profile_options(aws_home | {"AWS_ACCESS_KEY_ID": "Z"}) == {"region": "eu-west-1"}
    assert profile_options(aws_home | {"AWS_ACCESS_KEY_ID": "Z", "AWS_REGION": "us-west-2"}) == {}
    with pytest.raises(StartupError, match="AWS_PROFILE=sso: the profile has no static keys"):
        profile_options(aws_home | {"AWS_PROFILE": "sso"})
    with pytest.raises(StartupError, match="AWS_PROFILE=nobody: the profile is in neither"):
        profile_options(aws_home | {"AWS_PROFILE": "nobody"})
    (tmp_path / ".aws" / "credentials").write_text("no section")
    with pytest.raises(StartupError, match="credentials: cannot be read"):
        profile_options(aws_home)


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
