"""Checks the number of values and the depth of a JSON body on its raw bytes, before any parser runs.

A parser creates one object per value, so a body with few bytes per value takes many times its size in memory. Counting
separators takes about a millisecond per MiB. Text in strings doesn't count; strings are skipped only if the crude count
exceeds a limit, in runs, so that other threads can run in between and counting stops soon after the limit.
"""

import re
from array import array
from collections.abc import Iterator
from itertools import accumulate

from octavo_engine.wire.errors import InvalidRequest

from octavo_server.config import BodyLimits

#: Pattern of a string. An unclosed string extends to the end, so that no body causes repeated backtracking.
_STRING = rb'"(?:[^"\\]++|\\.)*+"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
#: A run has at most 4096 strings, so that skipping them takes less than a millisecond.
_RUNS = re.compile(rb'(?:[^"]*+%b){1,4096}+|[^"]++' % _STRING, re.DOTALL)
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b",[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one level down, one level up


def check_json(body: bytes, limits: BodyLimits) -> None:
    """Check the number of values and the depth of a body. Raises InvalidRequest."""
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
    """Yield the commas and brackets outside of strings, in runs, one after another."""
    for run in _RUNS.finditer(body):
        yield _STRINGS.sub(b"", run[0]).translate(None, _NOT_STRUCTURE)


def _check_depth(structure: bytearray, limit: int) -> None:
    steps = array("b", structure.translate(_STEPS, b","))
    if max(accumulate(steps), default=0) > limit:
        raise InvalidRequest(
            f"The JSON body is nested more than {limit} levels deep, the limit: flatten it, or start the server with a "
            "larger --max-json-depth."
        )
