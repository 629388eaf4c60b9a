"""One API key takes all that it can get; the requests of another key are all served. `-s` prints both rates."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress

import httpx
import pytest
from octavo_testing.serve_command import octavo_serve
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

NUM_REQUESTS = 20
#: The server's defaults, made smaller: 256 MiB of bodies and 8192 places in the queue.
FLAGS = ("--max-body-memory", "32M", "--max-num-queued-reqs", "512", "--dtype", "float32", "--max-num-seqs", "16")
UPLOADS, UPLOAD_BYTES = 16, (4 << 20) - 1


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("alice: sk-alice\nmallory: sk-mallory\n")
    model = make_tiny("llama", folder)
    with octavo_serve(model, "--api-key-file", str(keys), "--served-model-name", "tiny", *FLAGS) as serve:
        serve.wait_until_healthy()
        yield serve.url


def _request(prompt: str | list[str], **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}


async def _rate(url: str, **fields: object) -> float:
    """Requests of alice that are served in a second, one after the other; each must be served."""
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-alice"}, timeout=240) as http:
        began_s = time.monotonic()
        for _ in range(NUM_REQUESTS):
            answer = await http.post(f"{url}/v1/completions", json=_request("hello", **fields))
            assert answer.status_code == 200, answer.text
        return NUM_REQUESTS / (time.monotonic() - began_s)


@asynccontextmanager
async def _unfinished_bodies(url: str) -> AsyncIterator[None]:
    """Send most of many large bodies, and then nothing more."""
    address = httpx.URL(url)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-mallory\r\n"
        f"content-type: application/json\r\ncontent-length: {UPLOAD_BYTES + 1}\r\n\r\n"
    )

    def upload() -> socket.socket:
        sent = socket.create_connection((address.host, address.port))
        with suppress(OSError):  # the server refuses it
            sent.sendall(head.encode() + b" " * UPLOAD_BYTES)
        return sent

    with ExitStack() as stack:
        for sent in await asyncio.gather(*(asyncio.to_thread(upload) for _ in range(UPLOADS))):
            stack.callback(sent.close)
        yield


@asynccontextmanager
async def _senders(url: str, path: str, body: dict[str, object], *, num: int) -> AsyncIterator[None]:
    """Send the request again and again, `num` at a time."""
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-mallory"}, timeout=240) as http:

        async def send() -> None:
            while True:
                answer = await http.post(f"{url}{path}", json=body)
                assert answer.status_code < 500, answer.text

        senders = [asyncio.create_task(send()) for _ in range(num)]
        try:
            yield
        finally:
            for sender in senders:
                sender.cancel()
            done = await asyncio.gather(*senders, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in done), done


def _full_queue(url: str) -> AbstractAsyncContextManager[None]:
    """Keep as many sequences in the queue as the server accepts."""
    return _senders(url, "/v1/completions", _request(["a"] * 128, max_tokens=8), num=6)


def _large_answers(url: str) -> AbstractAsyncContextManager[None]:
    """Ask for answers that take more memory than the share of bodies and answers."""
    return _senders(url, "/v1/completions", _request(["a"] * 64, max_tokens=64, logprobs=20), num=2)


def _large_requests(url: str) -> AbstractAsyncContextManager[None]:
    """Keep the threads for large requests busy."""
    messages = [{"role": "user", "content": "word " * 40}] * 4000
    return _senders(url, "/tokenize", {"model": "tiny", "messages": messages}, num=8)


@pytest.mark.parametrize(
    ("attack", "fields"),
    [(_unfinished_bodies, {}), (_full_queue, {}), (_large_answers, {}), (_large_requests, {"user": "x" * 100_000})],
    ids=["bodies", "queue", "answers", "large requests"],
)
async def test_a_tenant_that_takes_all_fails_no_request_of_another(
    url: str, attack: Callable[[str], AbstractAsyncContextManager[None]], fields: dict[str, object]
) -> None:
    alone = await _rate(url, **fields)
    async with attack(url):
        attacked = await _rate(url, **fields)
    print(f"\n{attack.__name__}: {attacked:.1f} requests/s, alone {alone:.1f}: {attacked / alone:.2f}")
