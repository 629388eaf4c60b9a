"""The engine core process: `python -m octavo_engine.process.main`, started by `client.CoreProcess`.

Its loop reads messages, runs a step and sends the outputs; while there is no work it blocks on its inbox. The process
ignores the signals that end its parent: a supervisor sends them to the whole process group, and while the parent
drains, it needs the core. An exception in the loop is a bug; it ends the process, and the parent detects the exit.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from octavo_engine.log_format import configure_logging
from octavo_engine.loop.engine_core import EngineCore, freeze_gc
from octavo_engine.loop.start import find_loader, start_core
from octavo_engine.process import messages
from octavo_engine.process.exit_with_parent import exit_with_parent
from octavo_engine.process.ipc_sockets import Waker, from_core_address, remove_folder, to_core_address
from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError, StartupError, Unavailable

logger = logging.getLogger(__name__)

IGNORED_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # the process exits with its parent
STUCK_S = 2.0  # time in which a loop that is not stuck ends after a rank is lost
LINGER_MS = 2000  # time to deliver the error message of a core that could not start


def end_if_stuck(address: str) -> Callable[[EngineDead], None]:
    """Return a function that reports a lost rank and ends this process if the loop does not end it in `STUCK_S`.

    The loop may be stuck in gloo, which waits for a lost host until its own timeout. The socket is connected before
    this function returns, because its folder is removed soon after.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.immediate = True  # it is writable once it is connected
    outbox.connect(address)
    outbox.poll(flags=zmq.POLLOUT)

    def end(error: EngineDead) -> None:
        logger.error("the engine core ends: %s", error)
        outbox.send(messages.encode(messages.Failed(str(error))))
        outbox.close(linger=LINGER_MS)
        context.term()
        os._exit(1)

    def end_soon(error: EngineDead) -> None:
        timer = threading.Timer(STUCK_S, end, [error])
        timer.daemon = True
        timer.start()

    return end_soon


def serve(core: EngineCore, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]") -> None:
    waker = Waker()
    core.on_more_work(waker.wake)
    core.on_interim = lambda outputs: outbox.send(messages.encode(messages.Outputs(outputs)))
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(waker.fd, zmq.POLLIN)
    while True:
        if not core.has_work():
            sleep_s = core.sleep_s()
            poller.poll(None if sleep_s is None else math.ceil(1e3 * sleep_s))
            waker.clear()
        while inbox.poll(0):
            data = inbox.recv()
            try:
                message = messages.decode_to_core(data)
            except msgspec.ValidationError as error:
                outbox.send(messages.encode(messages.Outputs(messages.refusal(data, error))))
                continue
            match message:
                case messages.Add(request):
                    core.add(request)
                case messages.Abort(request_id, index):
                    core.abort(request_id, index)
                case messages.Call():
                    outbox.send(messages.encode(answer(core, message)))
                case messages.AdapterCall():
                    call_adapter(core, message, lambda reply: outbox.send(messages.encode(reply)))
                case messages.Stop():
                    return
        outbox.send(messages.encode(messages.Outputs(core.step())))


def call_adapter(core: EngineCore, call: messages.AdapterCall, send: Callable[[messages.FromCore], None]) -> None:
    """Answer a call now, or once the adapter is read: requests run meanwhile."""

    def reply(result: str | OctavoError) -> None:
        if isinstance(result, OctavoError):
            send(messages.CallFailed(call.call_id, str(result), isinstance(result, InvalidRequest)))
        else:
            send(messages.Answered(call.call_id, result))

    if call.name == "load_adapter":
        core.start_loading_adapter(call.call_id, call.adapter, reply)
    elif call.name == "end_load":
        core.end_loading_adapter(call.call_id)
    else:
        core.unload_adapter(call.adapter, call.location)
        reply(call.adapter)


def answer(core: EngineCore, call: messages.Call) -> messages.Answered | messages.CallFailed:
    try:
        return messages.Answered(call.call_id, core.call(call.name, call.tags))
    except Unavailable as error:
        return messages.CallFailed(call.call_id, str(error))


def run(start: messages.Start, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]") -> int:
    on_lost = end_if_stuck(from_core_address(start.folder)) if start.config.nnodes > 1 else None
    outbox.send(messages.encode(messages.Hello()))
    try:
        began_s, load = time.perf_counter(), find_loader(start.loader)
        import_s = time.perf_counter() - began_s
        core, ready = start_core(start.config, load)
    except OctavoError as error:
        code = error.code if isinstance(error, StartupError) else "StartupFailed"
        outbox.send(messages.encode(messages.Failed(str(error), code)))
        return 1
    freeze_gc()
    if on_lost is not None:
        core.on_lost(on_lost)
    outbox.send(messages.encode(messages.Ready(replace(ready, startup_s={"import": import_s} | ready.startup_s))))
    reason: str | None = "the engine core has failed; its log has the cause."
    try:
        serve(core, inbox, outbox)
        reason = None
    except EngineDead as error:
        logger.error("the engine core ends: %s", error)
        reason = str(error)
        outbox.send(messages.encode(messages.Failed(reason)))
        return 1
    finally:
        core.shutdown(reason)
    return 0


def main() -> int:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    pipe_fd = os.dup(0)  # not inherited by child processes of the core
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    data = messages.read_message(pipe_fd)  # the pipe stays open: its end signals the parent's exit
    if data is None:
        return 1
    start = messages.decode_start(data)
    configure_logging(start.log_format, process="core")
    exit_with_parent(pipe_fd, start.parent_pid, lambda: remove_folder(start.folder))
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        inbox.set_hwm(0)
        outbox.set_hwm(0)
        outbox.linger = LINGER_MS
        inbox.connect(to_core_address(start.folder))
        outbox.connect(from_core_address(start.folder))
        return run(start, inbox, outbox)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # Python would wait for a thread that hangs in the download of an adapter
