"""The engine's exceptions. Each message states the limit, the value and a remedy.

OctavoError
├── InvalidRequest(param)          400  the request must be changed
│   ├── ContextLengthExceeded      400  vLLM's wording and OpenAI's code, which clients look for
│   └── AdapterNameTaken           400  vLLM's wording
├── ModelNotFound                  404
├── Overloaded(retry_after_s)      429
├── Unavailable(retry_after_s)     503  the server accepts no requests now, or the request waited too long
├── EngineDead                     503  the engine core process has ended
│   └── GroupBroken                     a rank of the model is gone or late, and another one detects it
└── StartupError(code)             exit code 1: bad weights, too little memory, port in use, bad flag
"""

from typing import Literal

MAX_MESSAGE_CHARS = 2000


class OctavoError(Exception):
    """Base class of the errors whose messages are for users."""


class InvalidRequest(OctavoError, ValueError):
    """The request must be changed. It is a ValueError, too, as scripts for vLLM catch that."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the requested output exceed the context. Clients parse this message: its wording is API."""

    def __init__(self, *, max_model_len: int, num_requested: int, num_input: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_requested} output tokens and your prompt contains at least {num_input} input tokens, for a total "
            f"of at least {num_requested + num_input} tokens. Please reduce the length of the input prompt or the "
            f"number of requested output tokens. (parameter=input_tokens, value={num_input}) "
            "(code=context_length_exceeded)",
            param="input_tokens",
        )
        self.max_model_len = max_model_len
        self.num_input = num_input


class AdapterNameTaken(InvalidRequest):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )


class ModelNotFound(OctavoError):
    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.")


class Overloaded(OctavoError):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OctavoError):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(OctavoError):
    pass


class GroupBroken(EngineDead):
    """A collective operation has failed, as another rank is gone or late. The cause is in that rank."""


#: Errors of a call to an engine, such as waking up, that change nothing.
CALL_ERRORS = (OctavoError, OSError, RuntimeError, MemoryError)

#: Causes of a failed start, for programs: the operator derives the reasons of its conditions from them.
StartupCode = Literal["StartupFailed", "OutOfMemory", "ModelNotFound", "NoDevice"]


class StartupError(OctavoError):
    """The process cannot start. Long lines of the message are shortened; the process ends with exit code 1."""

    def __init__(self, message: str, *, code: StartupCode = "StartupFailed") -> None:
        super().__init__("\n".join(map(shortened, message.split("\n"))))
        self.code = code


def shortened(message: str) -> str:
    """Cut out the middle of a long message, which may quote a value of any length from a request or a file."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
