"""Bounds of a JSON body that are checked on its raw bytes, before any parser runs: its values and its depth.

A parser makes one object of each value, so a body of few bytes per value takes many times its size in memory. Counting
separators takes about a millisecond per MiB. The text in strings doesn't count; it is skipped only where the crude
count passes a limit, run by run, so that other threads get their turn and counting stops soon after the limit.
"""

import re
from array import array
from collections.abc import Iterator
from itertools import accumulate

from octavo_engine.wire.errors import InvalidRequest

from octavo_server.config import RequestLimits

#: A string that isn't closed reaches to the end, so that no body makes this start over and over.
_STRING = rb'"(?:[^"\\]++|\\.)*+"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
#: So many strings that skipping them takes less than a millisecond.
_RUNS = re.compile(rb'(?:[^"]*+%b){1,4096}+|[^"]++' % _STRING, re.DOTALL)
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b",[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one level down, one level up


def check_json(body: bytes, limits: RequestLimits) -> None:
    """Raises InvalidRequest."""
    num_open = body.count(b"[") + body.count(b"{")
    if num_open <= limits.max_json_depth and num_open + body.count(b",") <= limits.max_json_values:
        return
    structure = bytearray()
    num_values = 0
    for run in _structure(body):
        num_values += sum(map(run.count, (b",", b"[", b"{")))
        if num_values > limits.max_json_values:
            raise InvalidRequest(
                f"The JSON body holds more than {limits.max_json_values} values, the limit: send fewer, or start the "
                "server with a larger --max-json-values."
            )
        structure += run
    _check_depth(structure, limits.max_json_depth)


def _structure(body: bytes) -> Iterator[bytes]:
    """The commas and brackets outside of strings."""
    for run in _RUNS.finditer(body):
        yield _STRINGS.sub(b"", run[0]).translate(None, _NOT_STRUCTURE)


def _check_depth(structure: bytearray, limit: int) -> None:
    steps = array("b", structure.translate(_STEPS, b","))
    if max(accumulate(steps), default=0) > limit:
        raise InvalidRequest(
            f"The JSON body is nested more than {limit} levels deep, the limit: flatten it, or start the server with a "
            "larger --max-json-depth."
        )
