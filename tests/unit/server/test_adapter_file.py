"""The file of adapters: what is valid, and how an engine follows changes of it."""

import asyncio
import hashlib
import json
import logging

import pytest
from octavo_engine.wire.errors import AdapterNameTaken, InvalidRequest, StartupError, Unavailable
from octavo_server.api.adapter_file import LEAST_RETRY_S, MAX_CHARS, MAX_ENTRIES, AdapterFileFollower, read_adapter_file
from octavo_server.http.api_keys import CHECK_EVERY_S
from octavo_testing.clock import Clock

pytestmark = pytest.mark.asyncio


class Engine:
    """Holds the locations of adapters by name. `broken`: location -> error. `calls`: names in the order of loading."""

    def __init__(self):
        self.adapters, self.broken, self.calls, self.stalled = {}, {}, [], {}

    async def load_adapter(self, name, path, *, in_place=False):
        self.calls.append(name)
        if name in self.adapters and not in_place:
            raise AdapterNameTaken(name)
        if path in self.stalled:
            await self.stalled[path].wait()
        if path in self.broken:
            raise self.broken[path]
        self.adapters[name] = path

    async def unload_adapter(self, name):
        del self.adapters[name]


class Followed:
    def __init__(self, path, entries):
        self.path, self.engine, self.clock, self.states = path, Engine(), Clock(), []
        self.write(entries)
        self.follower = AdapterFileFollower(
            path, self.engine, taken=("base", "other"), report=self.states.append, clock=self.clock
        )

    def write(self, entries):
        """Replace the file, as Kubernetes does: `entries` are names and locations, or text."""
        new = self.path.with_suffix(".new")
        listed = entries if isinstance(entries, str) else json.dumps([{"name": n, "uri": u} for n, u in entries])
        new.write_text(listed)
        new.rename(self.path)

    async def update(self, entries=None, *, after_s=CHECK_EVERY_S):
        if entries is not None:
            self.write(entries)
        self.clock.now_s += after_s
        await self.follower.update()

    @property
    def missing(self):
        return self.states[-1].missing


@pytest.fixture
def file(tmp_path):
    return tmp_path / "adapters.json"


async def test_adapters_are_loaded_replaced_and_unloaded_as_the_file_changes(file):
    followed = Followed(file, [("a", "/a"), ("b", "/b")])
    await followed.update()
    assert followed.engine.adapters == {"a": "/a", "b": "/b"}
    await followed.update([("b", "/b2"), ("c", "/c")])
    assert followed.engine.adapters == {"b": "/b2", "c": "/c"}
    await followed.update("[]")
    assert followed.engine.adapters == {}
    assert followed.engine.calls == ["a", "b", "b", "c"]


async def test_nothing_is_loaded_again_while_the_file_stays(file):
    followed = Followed(file, [("a", "/a")])
    for _ in range(3):
        await followed.update(after_s=3600)
    await followed.update([("a", "/a")])  # written again
    assert followed.engine.calls == ["a"]


async def test_the_state_names_the_content_and_what_is_not_loaded_yet(file):
    followed = Followed(file, [("a", "/a"), ("b", "/b")])
    await followed.update()
    assert [state.missing for state in followed.states] == [{"a": "", "b": ""}, {"b": ""}, {}]
    assert {state.digest for state in followed.states} == {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}


async def test_a_bad_adapter_changes_nothing_else_and_is_tried_again(file, caplog):
    followed = Followed(file, [("a", "/a")])
    await followed.update()
    followed.engine.broken = {"/bad": InvalidRequest("rank 64"), "/a2": Unavailable("asleep", retry_after_s=1)}
    with caplog.at_level(logging.WARNING):
        await followed.update([("a", "/a2"), ("bad", "/bad"), ("b", "/b")])
        assert followed.engine.adapters == {"a": "/a", "b": "/b"}
        assert followed.missing == {"a": "asleep", "bad": "rank 64"}
        followed.engine.calls.clear()
        await followed.update(after_s=LEAST_RETRY_S / 4)
        assert followed.engine.calls == []
        await followed.update(after_s=LEAST_RETRY_S)
    assert followed.engine.calls == ["a", "bad"]
    assert sum("rank 64" in record.message for record in caplog.records) == 1
    followed.engine.broken = {}
    await followed.update(after_s=2 * LEAST_RETRY_S)
    assert followed.engine.adapters == {"a": "/a2", "b": "/b", "bad": "/bad"}
    assert followed.missing == {}


async def test_a_source_that_stalls_delays_no_other_adapter(file):
    followed = Followed(file, [("a", "/stalled"), ("b", "/b")])
    followed.engine.stalled = {"/stalled": asyncio.Event()}
    updating = asyncio.create_task(followed.update())
    while "b" not in followed.engine.adapters:
        await asyncio.sleep(0)
    assert not updating.done()
    followed.engine.stalled["/stalled"].set()
    await updating
    assert followed.engine.adapters == {"a": "/stalled", "b": "/b"}


async def test_what_has_failed_is_tried_after_what_has_not(file):
    followed = Followed(file, [("bad", "/bad"), ("a", "/a")])
    followed.engine.broken = {"/bad": InvalidRequest("no"), "/a": InvalidRequest("no")}
    await followed.update()
    followed.engine.broken.pop("/a")
    await followed.update([("bad", "/bad"), ("a", "/a"), ("b", "/b")])
    assert followed.engine.adapters == {"a": "/a", "b": "/b"}


@pytest.mark.parametrize("name", ["base", "other"], ids=["the model's", "of --lora-modules"])
async def test_a_name_that_is_taken_is_refused(file, name):
    followed = Followed(file, [(name, "/a")])
    followed.engine.adapters = {"other": "/given"}
    await followed.update()
    assert "choose another" in followed.missing[name]
    await followed.update("[]")
    assert followed.engine.adapters == {"other": "/given"}


@pytest.mark.parametrize("text", ["{", "name: a", '"a"', "- [", "a: 2001-99-99", "\x00"], ids=repr)
async def test_a_file_that_becomes_unusable_changes_nothing(file, text, caplog):
    followed = Followed(file, [("a", "/a")])
    await followed.update()
    await followed.update(text)
    assert followed.engine.adapters == {"a": "/a"}
    assert "the adapters stay as they are" in caplog.text
    file.unlink()
    await followed.update()
    assert followed.engine.adapters == {"a": "/a"}
    with pytest.raises(StartupError, match="--lora-modules-file"):
        AdapterFileFollower(file, followed.engine, taken=(), report=followed.states.append)


async def test_bad_entries_are_reported_and_end_nothing(file):
    bad = '[{name: a, uri: /a}, 3, {nam: b}, {name: c}, {name: d, uri: ""}, {name: e, uri: /e, rank: 4}, {uri: /f}]'
    followed = Followed(file, bad)
    await followed.update()
    assert followed.engine.adapters == {"a": "/a"}
    assert [*followed.missing] == ["entry 2", "entry 3", "c", "d", "e", "entry 7"]
    assert all("write {name: ..., uri: ...}" in reason for reason in followed.missing.values())


async def test_a_bad_entry_keeps_the_adapter_of_its_name(file):
    followed = Followed(file, [("a", "/a"), ("b", "/b")])
    await followed.update()
    await followed.update("[{name: a, uri: 5}, {name: b, uri: /x}, {name: b, uri: /y}]")
    assert followed.engine.adapters == {"a": "/a", "b": "/b"}
    assert followed.missing.keys() == {"a", "b"}
    assert "occurs 2 times" in followed.missing["b"]


async def test_an_empty_file_lists_no_adapter(file):
    file.write_text("")
    assert read_adapter_file(file).uris == {}


async def test_the_number_of_entries_is_limited(file):
    file.write_text(json.dumps([{"name": f"a{i}", "uri": "/a"} for i in range(MAX_ENTRIES + 1)]))
    with pytest.raises(StartupError, match=f"has {MAX_ENTRIES + 1} adapters; the limit is {MAX_ENTRIES}"):
        read_adapter_file(file)


async def test_long_reasons_and_names_are_cut_in_the_report(file):
    followed = Followed(file, [("a", "/a"), ("n" * 300, "/a")])
    followed.engine.broken = {"/a": InvalidRequest("x" * 1000)}
    await followed.update()
    assert {len(text) for text in followed.missing.values()} == {MAX_CHARS}
    assert {len(name) for name in followed.missing} == {1, MAX_CHARS}
