"""Translates the hub client's errors into one line with a remedy, and marks those for which a retry may help."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from octavo_engine.sources.retries import Interrupted, Unreachable
from octavo_engine.wire.errors import StartupError

_AGAIN = (408, 429, 500, 502, 503, 504)
_TOKEN = "set HF_TOKEN (on Kubernetes: a Secret with the entry HF_TOKEN in spec.model.secretRef)"


@contextmanager
def translate_hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Translate the hub client's exceptions: raise Interrupted if a retry may help, else StartupError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise StartupError(f"{repo}: this is neither a local path nor a Hugging Face model id.") from error
    except OfflineModeIsEnabled as error:
        raise Unreachable(_OFFLINE.format(repo)) from error
    except LocalEntryNotFoundError as error:
        raise _of_cause(repo, revision, error) from error
    except HfHubHTTPError as error:
        raise _of_answer(repo, revision, error) from error
    except _transport_errors() as error:
        raise Interrupted(f"the hub cannot be reached: {_first_line(error)}") from error
    except OSError as error:
        if error.errno is None:  # the download does not match its size or checksum
            raise Interrupted(_first_line(error)) from error
        raise StartupError(f"{repo}: cannot be stored: {error.strerror}: {error.filename}.") from error


_OFFLINE = (
    "{}: not in the local Hugging Face cache, and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set): check "
    "the network, or use a local folder."
)


def _of_cause(repo: str, revision: str | None, error: BaseException) -> Exception:
    """Translate the cause of "not found locally", which the client also raises if it cannot reach the hub."""
    from huggingface_hub.errors import HfHubHTTPError

    cause = error.__cause__
    if isinstance(cause, HfHubHTTPError):
        return _of_answer(repo, revision, cause)
    if isinstance(cause, _transport_errors()):
        return Interrupted(f"the hub cannot be reached: {_first_line(cause)}")
    return Unreachable(_OFFLINE.format(repo))


def _of_answer(repo: str, revision: str | None, error: BaseException) -> Exception:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return StartupError(f"{repo}: access to this model must be granted: request it on its page, then {_TOKEN}.")
    if isinstance(error, RevisionNotFoundError):
        return StartupError(f"{repo}: has no branch, tag or commit {revision!r}: check the revision.")
    if isinstance(error, RepositoryNotFoundError):
        return StartupError(f"{repo}: no such model on the hub: correct the name; if it is private, {_TOKEN}.")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return StartupError(f"{repo}: the hub denied access ({status}): {_TOKEN}.")
    if status in _AGAIN:
        return Interrupted(f"the hub returned {status}")
    return StartupError(f"{repo}: cannot be downloaded from the Hugging Face hub: {_first_line(error)}")


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the HTTP client's own exceptions, which the hub client passes on; its versions use different clients."""
    bases = {"httpx2": "HTTPError", "httpx": "HTTPError", "requests": "RequestException"}
    return tuple(getattr(sys.modules[name], base) for name, base in bases.items() if name in sys.modules)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
