"""`--lora-modules-file`: the adapters of an engine, from a file that its owner keeps up to date.

The file is a list in YAML or JSON: `[{"name": "support", "uri": "s3://bucket/support"}]`. A changed file is read again:
adapters that are new are loaded, those that are gone are unloaded, and a new `uri` replaces the adapter of its name. An
entry that can't be loaded changes nothing else; it is logged, reported in the KV stream, and tried again.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import yaml
from octavo_engine.settings.lora import check_adapter_name
from octavo_engine.wire.errors import OctavoError, StartupError

from octavo_server.backoff import Backoff
from octavo_server.http.api_keys import CHECK_EVERY_S, FileWatch, read_watched
from octavo_server.http.tenants_file import load_yaml
from octavo_server.kv.frames import AdapterFile

if TYPE_CHECKING:
    from octavo_engine.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

FLAG = "--lora-modules-file"
MAX_ENTRIES = 256
#: Longest name and reason in the KV stream, so that those of all entries fit into one frame.
MAX_CHARS = 200
DIGEST_CHARS = 16
LEAST_RETRY_S, MOST_RETRY_S = 2.0, 300.0

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Text
    uri: _Text


@dataclass(frozen=True, slots=True)
class ListedAdapters:
    """Content of the file. `digest`: the first characters of its SHA-256. `uris`: name -> uri of each valid entry.
    `faults`: name, or position, of each invalid entry -> its fault.
    """

    digest: str
    uris: Mapping[str, str]
    faults: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.uris or name in self.faults


def read_adapter_file(path: Path) -> ListedAdapters:
    """Raises StartupError for a file that is no list. Entries that are not valid are `faults`."""
    try:
        content = read_watched(path)
        entries = load_yaml(content) or []
    except OSError as error:
        raise StartupError(f"{FLAG} {path}: cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StartupError(f"{FLAG} {path}: is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(entries, list):
        raise StartupError(f"{FLAG} {path}: is no list: write [{{name: ..., uri: ...}}].")
    if len(entries) > MAX_ENTRIES:
        raise StartupError(f"{FLAG} {path}: has {len(entries)} adapters; the limit is {MAX_ENTRIES}: list fewer.")
    rows = [*_read_entries(entries)]
    counts = Counter(label for label, _, _ in rows)
    twice = {name: f"the name {name!r} occurs {n} times: list each name once." for name, n in counts.items() if n > 1}
    return ListedAdapters(
        hashlib.sha256(content).hexdigest()[:DIGEST_CHARS],
        {label: uri for label, uri, _ in rows if uri and label not in twice},
        {label: fault for label, _, fault in rows if fault} | twice,
    )


def _read_entries(entries: list[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, or position, of each entry with its uri or its fault."""
    for position, entry in enumerate(entries, 1):
        try:
            valid = msgspec.convert(entry, _Entry)
        except msgspec.ValidationError as error:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            label = name if isinstance(name, str) and name else f"entry {position}"
            yield label, "", f"{error}: write {{name: ..., uri: ...}}."
        else:
            yield valid.name, valid.uri, ""


class AdapterFileFollower:
    """`taken`: names that the file may not use. `report`: called with each new state. Raises StartupError."""

    def __init__(
        self,
        path: Path,
        client: "AsyncLLM",
        *,
        taken: Collection[str],
        report: Callable[[AdapterFile], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._client, self._taken, self._report = path, client, taken, report
        self._clock = clock
        self._watch = FileWatch([path], clock)
        self._loaded: dict[str, str] = {}  # name -> uri
        self._failures: dict[str, str] = {}  # name -> reason
        self._backoff, self._retry_at_s = _new_backoff(), clock()
        self._set_list(read_adapter_file(path))

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(CHECK_EVERY_S)

    async def update(self) -> None:
        """Read the file if it has changed; then unload the adapters that are due, and load others concurrently."""
        if self._watch.has_changed():
            self._read_again()
        for name in [name for name in self._loaded if name not in self._listed]:
            await self._unload(name)
        if self._clock() < self._retry_at_s:
            return
        due = sorted(self._waiting(), key=self._failures.__contains__)  # untried adapters first
        await asyncio.gather(*(self._load(name, self._listed.uris[name]) for name in due))
        wait_s = self._backoff.next_wait_s(lasted_s=0.0) if self._failures else float("inf")
        self._retry_at_s = self._clock() + wait_s

    def _read_again(self) -> None:
        try:
            self._set_list(read_adapter_file(self._path))
        except StartupError as error:
            logger.error("the adapters stay as they are: %s", error)

    def _set_list(self, listed: ListedAdapters) -> None:
        self._listed, self._failures = listed, {}
        self._backoff, self._retry_at_s = _new_backoff(), self._clock()
        for label, fault in listed.faults.items():
            logger.warning("%s %s: %s: %s", FLAG, self._path, label, fault)
        self._publish()

    def _waiting(self) -> list[str]:
        return [name for name, uri in self._listed.uris.items() if self._loaded.get(name) != uri]

    async def _load(self, name: str, uri: str) -> None:
        try:
            check_adapter_name(name, self._taken)
            await self._client.load_adapter(name, uri, in_place=name in self._loaded)
        except OctavoError as error:
            if self._failures.get(name) != str(error):
                logger.warning("adapter %r is not loaded from %s: %s", name, uri, error)
            self._failures[name] = str(error)
        else:
            self._loaded[name] = uri
            self._failures.pop(name, None)
            logger.info("adapter %r is loaded from %s", name, uri)
        self._publish()

    async def _unload(self, name: str) -> None:
        await self._client.unload_adapter(name)
        del self._loaded[name]
        logger.info("adapter %r is unloaded", name)

    def _publish(self) -> None:
        missing = {**{name: self._failures.get(name, "") for name in self._waiting()}, **self._listed.faults}
        shown = {_shortened(name): _shortened(why) for name, why in missing.items()}
        self._report(AdapterFile(self._listed.digest, shown))


def _new_backoff() -> Backoff:
    return Backoff(least_s=LEAST_RETRY_S, most_s=MOST_RETRY_S)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
