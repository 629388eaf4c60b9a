"""API keys: their sources and tenants, and reloading of changed files without a restart."""

import logging
import os

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import unnamed_tenant
from octavo_server.http.api_keys import CHECK_EVERY_S, ApiKeys, read_keys
from octavo_testing.clock import Clock


@pytest.fixture
def clock():
    return Clock()


def secret(folder, **keys):
    """A mounted Secret: `..data` links to the folder of one revision, and each entry links into it."""
    folder.mkdir(exist_ok=True)
    revision = folder / f"..{len(list(folder.iterdir()))}"
    revision.mkdir()
    for name, key in keys.items():
        (revision / name).write_text(f"{key}\n")
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(revision.name)
    (folder / "..new").replace(folder / "..data")
    for entry in folder.iterdir():
        if entry.is_symlink() and not entry.exists():
            entry.unlink()


def test_keys_of_flags_have_derived_names():
    ring = ApiKeys(["first", "sécond"])
    assert ring.tenant_of(b"first") == unnamed_tenant("first")
    assert ring.tenant_of("sécond".encode()) == unnamed_tenant("sécond")
    assert ring.tenant_of(b"third") is None
    assert ring.tenant_of(b"") is None


def test_a_file_of_names_and_keys_is_read(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# who: what\nalice: sk-a\n\n bob = sk=b: \ncarol='sk-c'\n")
    assert read_keys(path) == {"alice": "sk-a", "bob": "sk=b:", "carol": "sk-c"}


def test_a_mounted_secret_is_read(tmp_path):
    secret(tmp_path / "keys", alice="sk-a", bob="sk-b")
    assert read_keys(tmp_path / "keys") == {"alice": "sk-a", "bob": "sk-b"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("alice sk-secret", "line 1: expected"),
        ("alice:", "line 1: the key is empty"),
        ("# x\na/b: sk-secret", "line 2: a name has"),
        ("a: sk-secret\na: sk-other", "line 2: the name 'a' is given twice"),
        ("a: sk-secret\nb: sk-secret", "same API key"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_an_unusable_file_is_named_without_its_content(tmp_path, text, told):
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartupError, match=told) as caught:
        ApiKeys(paths=[path])
    assert "sk-" not in str(caught.value)


def test_a_swapped_secret_is_reloaded_without_a_restart(tmp_path, clock):
    secret(tmp_path / "keys", alice="sk-a", bob="sk-b")
    ring = ApiKeys(paths=[tmp_path / "keys"], clock=clock)
    assert (ring.tenant_of(b"sk-a"), ring.tenant_of(b"sk-b")) == ("alice", "bob")
    secret(tmp_path / "keys", alice="sk-new", carol="sk-c")
    clock.now_s = CHECK_EVERY_S
    answers = [ring.tenant_of(key) for key in (b"sk-new", b"sk-a", b"sk-b", b"sk-c")]
    assert answers == ["alice", None, None, "carol"]


def test_a_secret_with_many_keys_costs_one_check(tmp_path, clock, monkeypatch):
    secret(tmp_path / "keys", **{f"k{i}": f"sk-{i}" for i in range(50)})
    ring = ApiKeys(paths=[tmp_path / "keys"], clock=clock)
    monkeypatch.setattr("octavo_server.http.api_keys._entries", None)
    clock.now_s = CHECK_EVERY_S
    assert ring.tenant_of(b"sk-7") == "k7"


def test_a_changed_file_is_checked_at_an_interval(tmp_path, clock):
    path = tmp_path / "keys"
    path.write_text("alice: sk-a")
    ring = ApiKeys(["flag"], [path], clock=clock)
    path.write_text("alice: sk-new")
    os.utime(path, ns=(1, 1))
    assert ring.tenant_of(b"sk-a") == "alice"
    clock.now_s = CHECK_EVERY_S
    assert (ring.tenant_of(b"sk-a"), ring.tenant_of(b"sk-new")) == (None, "alice")
    assert ring.tenant_of(b"flag") == unnamed_tenant("flag")


def test_a_broken_change_leaves_the_keys_and_is_logged_once(tmp_path, clock, caplog):
    path = tmp_path / "keys"
    path.write_text("alice: sk-a")
    ring = ApiKeys(paths=[path], clock=clock)
    path.write_text("sk-half")
    with caplog.at_level(logging.ERROR):
        for clock.now_s in (CHECK_EVERY_S, 2 * CHECK_EVERY_S):
            assert ring.tenant_of(b"sk-a") == "alice"
    (record,) = caplog.records
    assert "the API keys were not reloaded" in record.message
    assert "sk-" not in record.message
    path.unlink()
    clock.now_s = 3 * CHECK_EVERY_S
    assert ring.tenant_of(b"sk-a") == "alice"


def test_an_empty_secret_admits_no_key(tmp_path):
    secret(tmp_path / "keys")
    assert ApiKeys(paths=[tmp_path / "keys"]).tenant_of(b"") is None
