"""The process of a rank other than rank 0: `python -m octavo_engine.process.rank`, started by `parallel_executor`.

It runs the plans and answers the calls that rank 0 sends. It ends with the engine core, whose signals it ignores as the
core does. An error in a plan ends it.
"""

import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import zmq

from octavo_engine.log_format import configure_logging
from octavo_engine.loop.engine_core import freeze_gc
from octavo_engine.loop.start import import_compute
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.exit_with_parent import exit_with_parent
from octavo_engine.process.ipc_sockets import remove_folder
from octavo_engine.process.main import IGNORED_SIGNALS
from octavo_engine.process.messages import Failed, framed, read_message
from octavo_engine.settings.config import ranks_per_host
from octavo_engine.wire.errors import CALL_ERRORS, EngineDead, GroupBroken, StartupError

if TYPE_CHECKING:
    from octavo_engine.runner.executor import LocalExecutor

_LOGGER = logging.getLogger(__name__)
Report = Callable[[messages.FromRank], None]


def serve(executor: "LocalExecutor", inbox: "zmq.Socket[bytes]", report: Report) -> NoReturn:
    """Run plans and answer calls until another rank is gone or late, which raises GroupBroken."""
    while True:
        match messages.decode_to_rank(inbox.recv()):
            case messages.RunPlan(plan):
                executor.submit(plan).result()
            case messages.Entry():
                pass  # an entry of a rank that connects later
            case messages.Leave():
                raise GroupBroken("rank 0 has lost another rank.")
            case call:
                report(answer(executor, call))


def receive_part(inbox: "zmq.Socket[bytes]") -> messages.LoadPart:
    """Wait for the first message."""
    part = messages.decode_to_rank(inbox.recv())
    if isinstance(part, messages.LoadPart):
        return part
    raise GroupBroken("rank 0 has lost another rank.")


def receive_entry(inbox: "zmq.Socket[bytes]", timeout_s: float) -> tuple[str, bytes]:
    """Wait for an entry. Until the group is open, a rank receives only entries and `Leave`."""
    if not inbox.poll(math.ceil(1e3 * timeout_s)):
        raise TimeoutError(f"another rank is late, after {timeout_s:.0f} s")
    message = messages.decode_to_rank(inbox.recv())
    if isinstance(message, messages.Entry):
        return message.key, message.value
    raise GroupBroken("rank 0 has lost another rank.")


def answer(executor: "LocalExecutor", call: messages.Call) -> messages.Answer:
    try:
        match call:
            case messages.Release(tag):
                executor.release(tag)
            case messages.Restore(tag):
                executor.restore(tag)
            case messages.AddAdapter(files, tensors, adapter):
                executor.add_read_adapter(files, tensors, adapter)
            case messages.RemoveAdapter(adapter):
                executor.remove_adapter(adapter)
    except CALL_ERRORS as error:
        return messages.Answer(str(error) or type(error).__name__)
    return messages.Answer()


def run(start: messages.RankStart, reports_fd: int, inbox: "zmq.Socket[bytes]") -> None:
    """Load this rank's part of the model, then run plans and answer calls. The last report says why the process
    ended."""

    def report(message: messages.FromRank) -> None:
        os.write(reports_fd, framed(messages.encode(message)))

    try:
        load = import_compute("octavo_engine.runner.load:load")
        # They need torch, which `import_compute` reports if it is missing.
        from octavo_engine.ops.message_store import MEETING_TIMEOUT, MessageStore
        from octavo_engine.runner.load import report_memory

        store = MessageStore(
            lambda key, value: report(messages.Entry(key, value)), partial(receive_entry, inbox), MEETING_TIMEOUT
        )
        inbox.bind(messages.inbox_address(start.folder, start.rank))
        is_first = start.config.node_rank > 0 and start.rank % ranks_per_host(start.config) == 0
        report(messages.RankHello(report_memory(start.config) if is_first else None))
        part = receive_part(inbox)
        executor, ready = load(part.config, part=part, store=store, progress=lambda done, total: None)
        freeze_gc()
        report(messages.RankReady(ready.weights_bytes))
        serve(executor, inbox, report)
    except GroupBroken:  # the cause is in another rank
        report(messages.Left())
    except StartupError as error:
        report(Failed(str(error), error.code))
    except EngineDead as error:  # an error of a step, which the runner has logged
        report(Failed(str(error)))
    except Exception as error:
        _LOGGER.exception("rank %d failed", start.rank)
        report(Failed(f"{type(error).__name__}: {error}"))


def main() -> int:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    pipe_fd, reports_fd = os.dup(0), os.dup(1)  # not inherited by child processes of the rank
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    data = read_message(pipe_fd)
    if data is None:
        return 1
    start = messages.decode_start(data)
    configure_logging(start.log_format, process=f"rank {start.rank}")
    logging.disable(logging.INFO)  # rank 0 logs the same
    exit_with_parent(pipe_fd, start.parent_pid, lambda: remove_folder(start.folder))
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.set_hwm(0)
        run(start, reports_fd, inbox)
    return 1


if __name__ == "__main__":
    sys.exit(main())
