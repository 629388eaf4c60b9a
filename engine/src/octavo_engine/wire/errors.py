"""The engine's error tree. Each message gives the limit, the value and what to do.

OctavoError
├── InvalidRequest(param)          400  the request can't be served as it stands
│   └── ContextLengthExceeded      400  vLLM's wording, which agents parse
├── ModelNotFound                  404
├── Overloaded(retry_after_s)      429
├── Unavailable(retry_after_s)     503  this server takes no requests now, or had no place in time
├── EngineDead                     503  the engine core process is gone
└── StartupError(code)             exit code 1: bad weights, no memory, port in use, bad flag
"""

from typing import Literal


class OctavoError(Exception):
    """Base of every error that Octavo raises for a user to read."""


class InvalidRequest(OctavoError):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


#: How an error begins that ends a running sequence where its own request, not the engine, is why: 400, not 500.
UNSATISFIABLE = "The request can't be met: "


class ContextLengthExceeded(InvalidRequest):
    """Clients compact and retry by parsing this message: its wording is API."""

    def __init__(self, *, max_model_len: int, num_requested: int, num_input: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_requested} output tokens and your prompt contains at least {num_input} input tokens, for a total "
            f"of at least {num_requested + num_input} tokens. Please reduce the length of the input prompt or the "
            f"number of requested output tokens. (parameter=input_tokens, value={num_input})",
            param="input_tokens",
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


#: Causes of a failed start, for programs: the operator derives the reasons of its conditions from them.
StartupCode = Literal["StartupFailed", "OutOfMemory", "ModelNotFound"]


class StartupError(OctavoError):
    """A start that failed, with one readable line and a code; the process ends with exit code 1."""

    def __init__(self, message: str, *, code: StartupCode = "StartupFailed") -> None:
        super().__init__(message)
        self.code = code
