"""`TerminalClient`: streams answers of one server to the terminal, from synchronous code. Ctrl-C only stops the answer.

All calls of a client use one event loop. Stopping an answer closes its connection, which makes the server abort the
request; the text received so far is kept.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from octavo_server.client.api import ApiClient, ApiFailure, Unreachable, normalise_url
from octavo_server.client.chunks import Chunk, StreamUsage

_DIM, _PLAIN = "\033[2m", "\033[0m"


@dataclass(slots=True)
class StreamedAnswer:
    """An answer, or the part that was received before Ctrl-C (`was_stopped`) or an error (`failure`)."""

    text: str = ""
    was_stopped: bool = False
    failure: str | None = None
    finish_reason: str | None = None
    usage: StreamUsage | None = None
    first_token_s: float | None = None
    duration_s: float = 0.0

    def stats(self) -> str:
        tokens = self.usage.completion_tokens if self.usage else None
        if self.first_token_s is None or self.usage is None or not tokens:
            return f"{self.duration_s:.1f} s"
        rate = (tokens - 1) / max(self.duration_s - self.first_token_s, 1e-9)
        return (
            f"{self.usage.prompt_tokens} prompt tokens, {tokens} answer tokens; first after "
            f"{self.first_token_s * 1000:.0f} ms, then {rate:.1f} tokens/s"
        )


class TerminalClient:
    """`model` None selects the first model of the server, and raises ApiFailure if the server can't be reached or lists
    no model."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self.url = normalise_url(url)
        self._runner = asyncio.Runner()
        try:
            self._api = self._runner.run(self._connect(key))
            self.model = model or self._runner.run(self._first_model())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_api"):
            self._runner.run(self._api.close())
        self._runner.close()

    def stream_answer(self, path: str, body: Mapping[str, Any]) -> StreamedAnswer:
        """Request an answer and print its text while it arrives."""
        request = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer = StreamedAnswer()
        started_s = time.monotonic()
        try:
            self._runner.run(self._print(path, request, answer, started_s))
        except KeyboardInterrupt:
            answer.was_stopped = True
        answer.duration_s = time.monotonic() - started_s
        return answer

    async def _connect(self, key: str | None) -> ApiClient:
        return ApiClient(self.url, key=key)

    async def _first_model(self) -> str:
        models = await self._api.models()
        if not models:
            raise ApiFailure(f"{self.url}/models lists no model yet: its engines may still be starting.")
        return models[0].id

    async def _print(self, path: str, request: Mapping[str, Any], answer: StreamedAnswer, started_s: float) -> None:
        printer = _Printer()
        try:
            async with aclosing(self._api.stream(path, request)) as chunks:
                async for chunk in chunks:
                    if chunk.has_content and answer.first_token_s is None:
                        answer.first_token_s = time.monotonic() - started_s
                    answer.text += chunk.text
                    answer.usage = chunk.usage or answer.usage
                    answer.finish_reason = chunk.finish_reason or answer.finish_reason
                    printer.show(chunk)
        except ApiFailure as error:
            answer.failure = explain_failure(error, self.url)
        finally:
            printer.end()


class _Printer:
    """Prints an answer's text and, only to a terminal, its reasoning, dimmed: scripts get the text alone."""

    def __init__(self) -> None:
        self._is_dim = False

    def show(self, chunk: Chunk) -> None:
        if chunk.reasoning and sys.stdout.isatty():
            self._write(chunk.reasoning, dim=True)
        if chunk.text:
            self._write(chunk.text, dim=False)
        sys.stdout.flush()

    def end(self) -> None:
        if self._is_dim:
            sys.stdout.write(_PLAIN)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str, *, dim: bool) -> None:
        if dim != self._is_dim:
            sys.stdout.write(_DIM if dim else f"{_PLAIN}\n")
            self._is_dim = dim
        sys.stdout.write(text)


def print_hint(text: str) -> None:
    """Print a message to standard error, dimmed if standard error is a terminal."""
    dims = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"{_DIM}{text}{_PLAIN}" if dims else text, file=sys.stderr)


def explain_failure(error: ApiFailure, url: str) -> str:
    """Text of the failure, with a remedy for the user."""
    if isinstance(error, Unreachable):
        port = urlsplit(url).port
        flags = f" --port {port}" if port not in (None, 8000) else ""
        return f"{error} Start a server with `octavo serve{flags}`, or give another address with --url."
    if error.status == 401:
        return f"{error} Give an API key of the server with --api-key or $OPENAI_API_KEY."
    return str(error)
