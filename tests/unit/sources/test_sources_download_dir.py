"""A folder holds a complete model or none: markers, resumed downloads, and the safety of foreign files."""

import dataclasses
import json
from pathlib import Path

import pytest
from octavo_engine.sources.download_dir import (
    MARKER,
    STAGING,
    Snapshot,
    check_disk_space,
    check_unclaimed,
    missing_files,
    move_into_place,
    prepare_staging,
    read_complete_snapshot,
)
from octavo_engine.wire.errors import StartupError

FILES = {"config.json": 2, "model.safetensors": 5, "Q4/m.gguf": 1}
CONTENT = Snapshot(uri="s3://b/m", version="v1", files=FILES)


def stage(folder: Path, snapshot: Snapshot, *names: str) -> None:
    staging = prepare_staging(folder, snapshot)
    for name in names:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(b"x" * snapshot.files[name])


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    stage(tmp_path, CONTENT, *FILES)
    move_into_place(tmp_path, CONTENT)
    return tmp_path


def test_a_moved_snapshot_is_complete(filled: Path) -> None:
    assert read_complete_snapshot(filled) == CONTENT
    assert missing_files(filled, CONTENT) == {}
    assert not (filled / STAGING).exists()


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"1234")])
def test_only_a_damaged_file_is_fetched_again(filled: Path, damage) -> None:
    damage(filled / "model.safetensors")
    assert read_complete_snapshot(filled) is None
    assert missing_files(filled, CONTENT) == {"model.safetensors": 5}


@pytest.mark.parametrize("marker", ["", "[]", '{"uri": 1}', '{"uri": "a", "version": "b", "more": 1}'])
def test_an_invalid_marker_is_ignored(tmp_path: Path, marker: str) -> None:
    (tmp_path / MARKER).write_text(marker)
    assert read_complete_snapshot(tmp_path) is None


def test_an_interrupted_fetch_is_resumed(tmp_path: Path) -> None:
    stage(tmp_path, CONTENT, "config.json")
    assert read_complete_snapshot(tmp_path) is None
    prepare_staging(tmp_path, CONTENT)
    assert set(missing_files(tmp_path, CONTENT)) == {"model.safetensors", "Q4/m.gguf"}
    newer = dataclasses.replace(CONTENT, version="v2")
    prepare_staging(tmp_path, newer)
    assert set(missing_files(tmp_path, newer)) == set(FILES)


def test_a_new_version_replaces_and_removes_files(filled: Path) -> None:
    newer = Snapshot(uri=CONTENT.uri, version="v2", files={"config.json": 3, "model.safetensors": 5})
    stage(filled, newer, *newer.files)
    move_into_place(filled, newer)
    assert read_complete_snapshot(filled) == newer
    assert not (filled / "Q4/m.gguf").exists()


def test_the_config_is_moved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without it is not served, so an interrupted move is never served."""
    stage(tmp_path, CONTENT, *FILES)
    moved, replace = [], Path.replace

    def remembering(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", remembering)
    move_into_place(tmp_path, CONTENT)
    assert moved[-2:] == ["config.json", MARKER]


def test_an_interrupted_move_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(tmp_path, CONTENT, *FILES)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            move_into_place(tmp_path, CONTENT)
    assert read_complete_snapshot(tmp_path) is None
    check_unclaimed(tmp_path, CONTENT.uri)
    prepare_staging(tmp_path, CONTENT)
    move_into_place(tmp_path, CONTENT)
    assert read_complete_snapshot(tmp_path) == CONTENT


def test_foreign_files_are_never_overwritten(filled: Path, tmp_path: Path) -> None:
    check_unclaimed(filled, CONTENT.uri)
    with pytest.raises(StartupError, match=r"holds s3://b/m, not s3://b/other"):
        check_unclaimed(filled, "s3://b/other")
    (filled / MARKER).unlink()
    with pytest.raises(StartupError, match=r"holds Q4, config\.json, model\.safetensors, which octavo did not fetch"):
        check_unclaimed(filled, CONTENT.uri)
    with pytest.raises(StartupError, match="is a file"):
        check_unclaimed(filled / "config.json", CONTENT.uri)


def test_a_new_volume_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    check_unclaimed(tmp_path, CONTENT.uri)
    check_unclaimed(tmp_path / "new", CONTENT.uri)


def test_too_little_space_is_reported_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3 * 2**30}))
    check_disk_space("hf://org/m", tmp_path / "a" / "b", needed_bytes=3 * 2**30, num_files=2)
    with pytest.raises(StartupError) as caught:
        check_disk_space("hf://org/m", tmp_path / "a" / "b", needed_bytes=5 * 2**30, num_files=2)
    assert "2 files of 5.00 GiB" in str(caught.value)
    assert "where 3.00 GiB are free: 2.00 GiB too little" in str(caught.value)


def test_the_marker_is_readable_json(filled: Path) -> None:
    assert json.loads((filled / MARKER).read_text()) == {
        "uri": "s3://b/m",
        "version": "v1",
        "files": FILES,
        "main": None,
    }
