"""The parent's end of an engine core process: start it, talk to it, notice its death, end it. asyncio, no torch."""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

import zmq
import zmq.asyncio

from octavo_engine.config import EngineConfig, ReadyInfo
from octavo_engine.log_format import LogFormat
from octavo_engine.process import messages
from octavo_engine.process.rendezvous import from_core_address, make_folder, remove_folder, to_core_address
from octavo_engine.wire.errors import EngineDead, StartupError
from octavo_engine.wire.inspection import Answer, CallName
from octavo_engine.wire.records import CoreOutputs

STOP_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
LAST_WORDS_S = 0.2  # what a dead process sent may still be on its way through the sockets
STDERR_FD = 2
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreProcess:
    """States: launched, ready, exited. Made by `launch`; `stop` is due in every state."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        self._process = process
        self._folder = folder
        self._is_ready = False
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._exited = asyncio.create_task(process.wait())
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = zmq.Socket(self._context, zmq.PUSH)  # a plain one: sending never waits
        for socket, address in ((self._inbox, from_core_address(folder)), (self._outbox, to_core_address(folder))):
            socket.set_hwm(0)
            socket.bind(address)

    @classmethod
    async def launch(cls, config: EngineConfig, loader: str, log_format: LogFormat = "text") -> "CoreProcess":
        """The child's output goes to our standard error: its loading progress is for the user to see."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "octavo_engine.process.main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=STDERR_FD,
            stderr=STDERR_FD,
        )
        core = cls(process, make_folder())
        start = messages.Start(
            config=config, loader=loader, folder=core._folder, parent_pid=os.getpid(), log_format=log_format
        )
        core._write_start(start)
        return core

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU time of the process so far, all threads; 0 when it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / CLOCK_TICKS_PER_S

    async def ready(self) -> ReadyInfo:
        """Raises StartupError with the core's own words, or with its exit code."""
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
        raise StartupError(f"the engine core {self._exit_words()} while starting; its error is printed above.")

    def send(self, message: messages.ToCore) -> None:
        """Raises EngineDead. Never blocks: the queue has no bound, the caller bounds the requests in flight."""
        try:
            self._outbox.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDead("the engine core is gone.") from error

    async def outputs(self) -> AsyncGenerator[CoreOutputs, None]:
        """Ends by raising EngineDead. Calls are answered only while somebody reads this."""
        try:
            async with aclosing(self._messages()) as received:
                async for message in received:
                    match message:
                        case messages.Outputs(core):
                            yield core
                        case messages.Answered(call_id, answer):
                            self._answer(call_id, answer)
        finally:
            for waiting in self._calls.values():
                waiting.cancel()
        raise EngineDead(f"the engine core {self._exit_words()}.")

    async def call(self, name: CallName, timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        """Raises EngineDead, also when no answer comes in time: a step that long, or a core that hangs."""
        call_id = next(self._call_ids)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = waiting
        try:
            self.send(messages.Call(call_id, name))
            await asyncio.wait({waiting}, timeout=timeout_s)
            if not waiting.done():
                raise EngineDead(f"the engine core has not answered within {timeout_s:g} s: see /health.")
            if waiting.cancelled():
                raise EngineDead(f"the engine core {self._exit_words()}.")
            return waiting.result()
        finally:
            del self._calls[call_id]

    def _answer(self, call_id: int, answer: Answer) -> None:
        waiting = self._calls.get(call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def stop(self) -> None:
        """Ask it to end, wait a little, kill it. A second call does nothing."""
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
        """Until the process has exited and all that it sent is read."""
        receive = asyncio.ensure_future(self._inbox.recv())
        try:
            while True:
                await asyncio.wait({receive, self._exited}, return_when=asyncio.FIRST_COMPLETED)
                if not receive.done():
                    await asyncio.wait({receive}, timeout=LAST_WORDS_S)
                if not receive.done():
                    return
                data = receive.result()
                receive = asyncio.ensure_future(self._inbox.recv())
                yield messages.decode_from_core(data)
        finally:
            receive.cancel()

    def _write_start(self, start: messages.Start) -> None:
        assert self._process.stdin is not None
        data = messages.encode(start)
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)

    def _exit_words(self) -> str:
        code = self._process.returncode
        if code is None:
            return "stopped answering"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
