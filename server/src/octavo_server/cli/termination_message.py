"""The termination message of a container: a JSON object with the error's code, which the operator reads.

Kubernetes copies the file to the container's status when the container ends. If the file is empty, the status of the
operator's pods has the end of the log instead, from which no code can be read.
"""

import json
from contextlib import suppress
from pathlib import Path

from octavo_engine.wire.errors import StartupError

PATH = Path("/dev/termination-log")  # Kubernetes mounts this file into every container
MAX_BYTES = 4096  # Kubernetes shortens a longer message


def write_termination_message(error: StartupError) -> None:
    """Write the error as the termination message, in a container of Kubernetes."""
    with suppress(OSError):
        if PATH.exists():
            PATH.write_text(termination_message(error))


def termination_message(error: StartupError) -> str:
    """The JSON object {"code", "message"}; a long message is shortened so that the object has at most `MAX_BYTES`."""
    message = str(error)
    while len((text := json.dumps({"code": error.code, "message": message})).encode()) > MAX_BYTES:
        message = message[: len(message) * 3 // 4]
    return text
