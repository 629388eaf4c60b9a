import os
import signal
import threading

import pytest
from octavo_engine.offline.interrupts import deferred_interrupt


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_check():
    with deferred_interrupt() as interrupt:
        interrupt.check()
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait():
    with deferred_interrupt():
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_is_kept():
    seen = []
    own = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        with deferred_interrupt() as interrupt:
            ctrl_c()
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, own)
    assert seen == [signal.SIGINT]


def test_other_threads_change_no_signal_handler():
    done = []

    def work():
        with deferred_interrupt() as interrupt:
            interrupt.check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
