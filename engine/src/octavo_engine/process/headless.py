"""`octavo serve --headless`: runs the ranks of a host other than the first, without an API or an engine core.

The first host commands it to start ranks; it forwards messages to them and their reports to the first host. It ends
when the first host has ended, or when the connection is lost.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from octavo_engine.process import rank_messages as messages
from octavo_engine.process.control_connection import LOST_S, MOST_FAILURES, ControlConnection, describe_address
from octavo_engine.process.ipc_sockets import make_folder, remove_folder
from octavo_engine.process.rank_processes import RankProcess, own_start, without_text
from octavo_engine.process.remote_hosts import (
    SECRET_VARIABLE,
    common_settings,
    named_fingerprints,
    own_address,
    read_secret,
)
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import download_dir, locate_adapter, resolve_files
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)
_REMINDER_S = 10.0

#: A message of the first host, an error that ends this host, or None, which ends this host without an error.
Event = messages.ToHost | StartupError | None


class HeadlessHost:
    """`is_serving`: all ranks of all hosts are ready. Any thread may call `drain` and `end` during `run`."""

    def __init__(self, config: EngineConfig) -> None:
        secret, self._config = read_secret(os.environ), config
        self._first = f"the first host ({describe_address(config.master_addr, config.master_port)})"
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._is_connected = self._has_started = self._is_draining = self.is_serving = False
        self._files: ModelFiles | None = None
        self._adapters: dict[str, Path] = {}  # folders of those of the start, by name
        self._ranks: dict[int, RankProcess] = {}
        self._connection = ControlConnection(secret, config.master_addr, config.master_port, self, listens=False)
        self._folder = make_folder()  # last, as only `run` removes it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection.start()

    def run(self) -> None:
        """Run the ranks of this host until the first host stops the engine. Raises StartupError if they end for another
        reason."""
        try:
            self._run()
        finally:
            self._stop()

    def drain(self) -> None:
        """End this host once the engine has finished its requests; at once if none has started, or at a second call."""
        if self._is_draining or not self._has_started:
            self.end()
        self._is_draining = True
        self._connection.send(messages.encode(messages.Drain()))

    def end(self) -> None:
        """End this host now."""
        self._events.put(None)

    def _run(self) -> None:
        while True:
            match self._next_event():
                case None:
                    return
                case StartupError() as error:
                    raise error
                case messages.Goodbye(None):
                    _LOGGER.info("%s has stopped the engine", self._first)
                    return
                case messages.Goodbye(reason) | messages.HostRefused(reason):
                    raise StartupError(f"{self._first}: {reason}")
                case event:
                    with self._reporting():
                        self._handle(event)

    def _stop(self) -> None:
        for each in self._ranks.values():
            each.request_stop()
        for each in self._ranks.values():
            each.stop()
        self._connection.close()
        self._context.destroy(linger=0)
        remove_folder(self._folder)

    def connected(self) -> None:
        self._is_connected = True
        try:
            address = own_address(self._config.master_addr, self._config.master_port)
        except OSError as error:
            self._events.put(StartupError(f"{self._first} has no route from this host: {error}: set VLLM_HOST_IP."))
            return
        hello = messages.HostHello(self._config.node_rank, address, common_settings(self._config))
        _LOGGER.info("connected to %s from %s, and waiting for further hosts", self._first, hello.address)
        self._connection.send(messages.encode(hello))

    def received(self, peer: bytes, message: bytes) -> None:
        try:
            self._events.put(messages.decode_to_host(message))
        except msgspec.DecodeError as error:
            self._events.put(StartupError(f"{self._first}: {messages.describe_unknown(error)}"))

    def lost(self, peer: bytes) -> None:
        if self._is_draining:  # the first host was still loading
            self.end()
        self._events.put(StartupError(f"{self._first} has ended, or gave no sign of life for {LOST_S} s."))

    def refused(self) -> None:
        text = f"{self._first}: {MOST_FAILURES} handshakes in a row have failed: either its ${SECRET_VARIABLE} differs"
        remedy = "set the variable to the same value on all hosts, and connect them without a proxy."
        self._events.put(StartupError(f"{text}, or a proxy on the way closes connections: {remedy}"))

    def _next_event(self) -> Event:
        while True:
            with suppress(queue.Empty):
                return self._events.get(timeout=_REMINDER_S)
            if not self._is_connected:
                _LOGGER.info("waiting for %s", self._first)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error to the first host, and end this one with it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, StartupError):
                _LOGGER.exception("this host has failed")
                error = StartupError(f"{type(error).__name__}: {error}")
            self._connection.send(messages.encode(messages.HostFailed(str(error))))
            self._events.put(error)

    def _find_files(self, wanted: messages.FindFiles) -> None:
        config = self._config
        if wanted.model == config.model and config.model.rpartition("://")[0] in ("", "hf"):
            config = replace(config, revision=wanted.revision or config.revision)
        with self._reporting():
            self._files = resolve_files(config)
            self._adapters = {name: self._find_adapter(name, *given) for name, given in wanted.adapters.items()}
            found = messages.Found(named_fingerprints(config, self._files, self._adapters))
            self._connection.send(messages.encode(found))

    def _find_adapter(self, name: str, location: str, revision: str) -> Path:
        """Return the folder of an adapter; download it if need be. Raises StartupError.

        A location in this host's settings has priority, because a path of the first host may not exist here.
        """
        own = {each.name: each.path for each in self._config.lora_modules}.get(name, location)
        is_of_hub = own == location and location.rpartition("://")[0] in ("", "hf")
        try:
            return locate_adapter(own, download_dir(self._config), revision=(is_of_hub and revision) or None)
        except StartupError as error:
            text = f"adapter {name} ({location} on the first host): {error}"
            remedy = f"--lora-modules {name}=FOLDER sets its location on this host."
            raise StartupError(f"{text} {remedy}", code=error.code) from error

    def _handle(self, message: messages.ToHost) -> None:
        match message:
            case messages.FindFiles():
                self._has_started = True
                threading.Thread(target=self._find_files, args=[message], name="find-files", daemon=True).start()
            case messages.StartRank(rank):
                start = own_start(rank, self._config, self._folder)
                self._ranks[rank] = RankProcess(start, self._context.socket(zmq.PUSH), self._report)
            case messages.LoadRank(part):
                assert self._files is not None
                part.files, part.divides_threads = without_text(self._files), True
                modules = (replace(each, path=str(self._adapters[each.name])) for each in part.config.lora_modules)
                own_threads = self._config.num_threads
                part.config = replace(part.config, num_threads=own_threads, lora_modules=tuple(modules))
                self._ranks[part.rank].load(part)
            case messages.Pass(rank, data):
                self._ranks[rank].send(data)
            case messages.Kill(rank):
                self._ranks[rank].kill()
            case messages.Serving():
                self.is_serving = True
                _LOGGER.info("the model is served at %s", self._first)

    def _report(self, rank: int, report: messages.FromRank | None) -> None:
        self._connection.send(messages.encode(messages.Reported(rank, report)))
