"""The parent's side of an engine core process: starts it, exchanges messages, detects its death and stops it.

It uses asyncio and imports no torch.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import zmq
import zmq.asyncio

from octavo_engine.log_format import LogFormat
from octavo_engine.process import messages
from octavo_engine.process.ipc_sockets import from_core_address, make_folder, remove_folder, to_core_address
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.inspection import Answer, CallName
from octavo_engine.wire.records import CoreOutputs
from octavo_engine.wire.sleep import WAKE_RETRY_S, MemoryTag

DEFAULT_LOADER = "octavo_engine.process.parallel_executor:load_executor"

STOP_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 0.2  # the sockets may still have messages of an ended process
STDERR_FD = 2
PROBE_ID = -1  # id of the call of `probe`
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreProcess:
    """An engine core process: launched, ready, then exited. Create it with `launch`; call `stop` in every state."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        self._process = process
        self._folder = folder
        self._is_ready = False
        self._cpu_s = 0.0
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._exited = asyncio.create_task(process.wait())
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = zmq.Socket(self._context, zmq.PUSH)  # not an asyncio socket: sending never waits
        for socket, address in ((self._inbox, from_core_address(folder)), (self._outbox, to_core_address(folder))):
            socket.set_hwm(0)
            socket.bind(address)

    @classmethod
    async def launch(cls, config: EngineConfig, loader: str, log_format: LogFormat = "text") -> "CoreProcess":
        """Start the process. Its output goes to this process's stderr, so that the user sees the loading progress.

        Raises StartupError if there is no writable folder for temporary files.
        """
        folder = make_folder()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "octavo_engine.process.main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=STDERR_FD,
            stderr=STDERR_FD,
        )
        core = cls(process, folder)
        start = messages.Start(
            config=config, loader=loader, folder=core._folder, parent_pid=os.getpid(), log_format=log_format
        )
        core._write_start(start)
        return core

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and of its ranks so far; 0 after it has exited.

        While `/proc` can't be read, as this process has no file descriptor left, the last value stays.
        """
        with suppress(OSError):
            threads = Path(f"/proc/{self.pid}/task").glob("*/children")  # each thread has children of its own
            ranks = [pid for each in threads for pid in _read(each).split()]
            self._cpu_s = sum(map(_cpu_s, [str(self.pid), *ranks]))
        return self._cpu_s

    async def ready(self) -> ReadyInfo:
        """Wait until the core is ready. Raises StartupError with the core's message, or with its exit code."""
        async with aclosing(self._messages()) as received:
            async for message in received:
                match message:
                    case messages.Hello():
                        remove_folder(self._folder)
                    case messages.Failed(text, code):
                        raise StartupError(text, code=code)
                    case messages.Ready(info):
                        self._is_ready = True
                        return info
        raise StartupError(f"the engine core {self._exit_description()} while starting; its error is printed above.")

    def send(self, message: messages.ToCore) -> None:
        """Queue a message to the core without blocking; the caller must bound the queue. Raises EngineDead."""
        try:
            self._outbox.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDead("the engine core is gone.") from error

    async def outputs(self) -> AsyncGenerator[CoreOutputs, None]:
        """Yield outputs until EngineDead is raised. `call` gets its answer only while this generator is consumed."""
        try:
            async with aclosing(self._messages()) as received:
                async for message in received:
                    match message:
                        case messages.Outputs(core):
                            yield core
                        case messages.Failed(text):
                            raise EngineDead(f"the engine core has ended: {text}")
                        case messages.Answered(call_id, answer):
                            self._resolve_call(call_id, answer)
                        case messages.CallFailed(call_id, text, is_invalid):
                            unavailable = Unavailable(text, retry_after_s=WAKE_RETRY_S)
                            self._resolve_call(call_id, InvalidRequest(text) if is_invalid else unavailable)
        finally:
            for waiting in self._calls.values():
                waiting.cancel()
        raise EngineDead(f"the engine core {self._exit_description()}.")

    async def call(
        self, name: CallName, tags: Sequence[MemoryTag] = (), *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Answer:
        """Call a function of the core, between two steps. `tags`: see `EngineCore.call`, as for Unavailable.

        Raises EngineDead, also without an answer in time.
        """
        return await self._call(lambda call_id: messages.Call(call_id, name, [*tags]), timeout_s)

    async def load_adapter(self, location: str) -> str:
        """Load an adapter, without a timeout, and return its hash. If the call is cancelled, the load is undone.

        Raises InvalidRequest, Unavailable and EngineDead.
        """
        call_id = next(self._call_ids)
        waiting = self._send_call(call_id, messages.AdapterCall(call_id, "load_adapter", location))
        try:
            return str(await self._answer(waiting, None))
        except asyncio.CancelledError:
            waiting.add_done_callback(partial(self._unload_unwanted, location))
            with suppress(EngineDead):
                self.send(messages.AdapterCall(call_id, "end_load", ""))
            raise

    async def unload_adapter(self, adapter: str, location: str) -> None:
        """Undo one load of an adapter from `location`. `adapter`: its hash. Raises EngineDead as `call` does."""
        await self._call(
            lambda call_id: messages.AdapterCall(call_id, "unload_adapter", adapter, location), CALL_TIMEOUT_S
        )

    def probe(self) -> bool:
        """Return True if the process has answered the last probe; then, and the first time, send the next one."""
        waiting = self._calls.get(PROBE_ID)
        if waiting is not None and not waiting.done():
            return False
        self._calls[PROBE_ID] = asyncio.get_running_loop().create_future()
        with suppress(EngineDead):
            self.send(messages.Call(PROBE_ID, "probe"))
        return waiting is not None

    async def _call(self, message: Callable[[int], messages.ToCore], timeout_s: float) -> Answer:
        call_id = next(self._call_ids)
        waiting = self._send_call(call_id, message(call_id))
        try:
            return await self._answer(waiting, timeout_s)
        finally:
            waiting.cancel()

    def _send_call(self, call_id: int, message: messages.ToCore) -> "asyncio.Future[Answer]":
        """Send a call; return a future of its answer, which is cancelled when the core ends. Raises EngineDead."""
        self.send(message)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = waiting
        waiting.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return waiting

    async def _answer(self, waiting: "asyncio.Future[Answer]", timeout_s: float | None) -> Answer:
        await asyncio.wait({waiting}, timeout=timeout_s)
        if not waiting.done():
            raise EngineDead(f"the engine core has not answered within {timeout_s:g} s: see /health.")
        if waiting.cancelled():
            raise EngineDead(f"the engine core {self._exit_description()}.")
        return waiting.result()

    def _unload_unwanted(self, location: str, loaded: "asyncio.Future[Answer]") -> None:
        """Unload an adapter that was loaded just when its load was cancelled."""
        if not loaded.cancelled() and loaded.exception() is None:
            call_id, adapter = next(self._call_ids), str(loaded.result())
            with suppress(EngineDead):
                self.send(messages.AdapterCall(call_id, "unload_adapter", adapter, location))

    def _resolve_call(self, call_id: int, answer: Answer | OctavoError) -> None:
        waiting = self._calls.get(call_id)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, OctavoError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    async def stop(self) -> None:
        """Request the process to stop; kill it if it runs after 5 s. A second call does nothing."""
        if self._outbox.closed:
            return
        try:
            if self._is_ready:
                with suppress(EngineDead):
                    self.send(messages.Stop())
                await asyncio.wait({self._exited}, timeout=STOP_TIMEOUT_S)
            if not self._exited.done():
                self._process.kill()
            await self._exited
        finally:
            self._outbox.close(linger=0)
            self._context.destroy(linger=0)
            remove_folder(self._folder)

    async def _messages(self) -> AsyncGenerator[messages.FromCore, None]:
        """Yield messages until the process has exited and all its messages are read."""
        receive = asyncio.ensure_future(self._inbox.recv())
        try:
            while True:
                await asyncio.wait({receive, self._exited}, return_when=asyncio.FIRST_COMPLETED)
                if not receive.done():
                    await asyncio.wait({receive}, timeout=DRAIN_TIMEOUT_S)
                if not receive.done():
                    return
                data = receive.result()
                receive = asyncio.ensure_future(self._inbox.recv())
                yield messages.decode_from_core(data)
        finally:
            receive.cancel()

    def _write_start(self, start: messages.Start) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(messages.framed(messages.encode(start)))

    def _exit_description(self) -> str:
        code = self._process.returncode
        if code is None:
            return "stopped answering"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _cpu_s(pid: str) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / CLOCK_TICKS_PER_S  # user and system time


def _read(path: Path) -> str:
    """Read a `/proc` file of a process or thread; it is empty once the process or thread has ended. Raises OSError."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
