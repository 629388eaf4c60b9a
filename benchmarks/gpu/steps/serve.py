"""`octavo serve` with random weights in Qwen3-0.6B's shape: its start, streams, a schema, sleep, a killed engine core.

All cases use one server, so they run in this process, and end when the step's time is over. The first case starts it,
and a later one again if it has ended.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu.step import LeftOut, Step, parse_step, run_case
from octavo_server.client.api import ApiClient, ApiFailure

CASE_S = {"cuda": 60.0, "cpu": 120.0}  # most seconds of a case, with the start of the server
NUM_STREAMS, NUM_AGAIN, NUM_KILLED = 20, 6, 8
FLAGS = "--host 127.0.0.1 --load-format dummy --served-model-name m --enable-sleep-mode"
SAMPLED = {"top_k": 20, "top_p": 0.95, "temperature": 0.8, "seed": 3}
PROPERTIES = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": False}


def write_model(step: Step) -> Path:
    """Write the shape, and a tokenizer whose vocabulary has its usual size, as masks and decoding depend on it."""
    from gpu.dummy_models import SHAPES
    from octavo_testing.tiny_models import byte_tokenizer

    folder = step.work / "served"
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES["Qwen3-0.6B" if step.is_gpu else "tiny-qwen3"]
    last = config["vocab_size"] - 1  # a token without text ends an output, so random weights rarely do
    tokenizer = json.loads(byte_tokenizer().to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"word{i}": i for i in range(len(vocab), last - 20)}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    files = {"config": config | {"eos_token_id": last}, "tokenizer_config": {"chat_template": template}}
    for name, content in {**files, "tokenizer": tokenizer}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@dataclass
class Stream:
    """A stream as its client sees it: text, end, and the seconds to the first chunk and to the end."""

    text: str = ""
    end: str = ""
    error: str = ""
    first_s: float = float("inf")
    total_s: float = float("inf")

    @property
    def is_whole(self) -> bool:
        return self.end == "length" and not self.error


class Server:
    def __init__(self, step: Step) -> None:
        self.step, self.began, self.is_ready = step, time.monotonic(), False
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        self.url, self.log = f"http://127.0.0.1:{port}", step.work / f"serve-{port}.log"
        sizes = "--max-model-len 2048" if step.is_gpu else "--max-model-len 256 --num-gpu-blocks-override 200"
        flags = f"{FLAGS} --device {step.device} --port {port} {sizes}".split()
        command = [sys.executable, "-m", "octavo_server.cli.main", "serve", str(write_model(step)), *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    async def wait_ready(self, api: ApiClient) -> None:
        """Raises RuntimeError if the server has ended."""
        while not self.is_ready:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended with {self.process.poll()}: {self.last_lines()}")
            with contextlib.suppress(ApiFailure):
                await api.get(f"{self.url}/health")
                self.is_ready = True
            await asyncio.sleep(0.1)

    def body(self, i: int, **more: Any) -> dict[str, Any]:
        words, count = (20, 64) if self.step.is_gpu else (3, 8)
        prompt = f"text {i} of a story about {'abc ' * words}"
        common = {"model": "m", "stream": True, "max_tokens": count, "ignore_eos": True, "temperature": 0.0}
        return {**common, "prompt": prompt, **more}

    def last_lines(self) -> str:
        return " / ".join(self.log.read_text(errors="replace").splitlines()[-4:])[-500:]


async def read_stream(api: ApiClient, body: dict[str, Any], found: Stream) -> Stream:
    began = time.monotonic()
    try:
        async for chunk in api.stream("/v1/completions", body):
            found.first_s = min(found.first_s, time.monotonic() - began)
            found.text += chunk.text
            found.end = chunk.finish_reason or found.end
    except ApiFailure as error:
        found.error = str(error)
    found.total_s = time.monotonic() - began
    return found


async def read_streams(api: ApiClient, bodies: list[dict[str, Any]]) -> list[Stream]:
    return list(await asyncio.gather(*(read_stream(api, body, Stream()) for body in bodies)))


async def status_of(request: Awaitable[bytes]) -> int | None:
    try:
        await request
    except ApiFailure as error:
        return error.status
    return 200


def used_gib(step: Step) -> float:
    if not step.is_gpu:
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


async def start(step: Step, server: Server, api: ApiClient) -> None:
    step.figure("ready after", time.monotonic() - server.began, "s")
    step.figure("memory of the GPU in use when ready", used_gib(step), "GiB")
    metrics = (await api.get(f"{server.url}/metrics")).decode().splitlines()
    step.figure("stages", note="; ".join(x for x in metrics if "startup" in x and not x.startswith("#"))[:500])
    log = server.log.read_text(errors="replace").splitlines()
    for level, most in (("INFO", 14), ("WARNING", 6), ("ERROR", 6)):
        for text in [each for each in log if f" {level} " in each][:most]:
            step.figure(f"log, {level}", note=text[:260])


async def streams(step: Step, server: Server, api: ApiClient) -> None:
    alone = await read_stream(api, server.body(0), Stream())
    note = f"first token: {alone.first_s:.3f} s; end {alone.end!r} {alone.error}"
    step.check("first request", alone.is_whole, alone.total_s, "s", note)
    bodies = [server.body(i, **(SAMPLED if i % 2 else {})) for i in range(NUM_STREAMS)]
    found = await read_streams(api, bodies)
    good = sum(each.is_whole for each in found)
    note = "; ".join({each.error for each in found if each.error}) or f"slowest {max(x.total_s for x in found):.2f} s"
    step.check(f"{NUM_STREAMS} streams at once", good == NUM_STREAMS, f"{good} of {NUM_STREAMS}", note=note[:300])
    again = await read_streams(api, bodies[:NUM_AGAIN])
    equal = sum(ours.text == first.text and ours.is_whole for ours, first in zip(again, found, strict=False))
    note = "bf16: a batch of another size may round otherwise"
    step.figure("the same streams again, fewer at once", f"{equal} of {NUM_AGAIN}", "texts equal", note)


async def schema(step: Step, server: Server, api: ApiClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 1}
    answer = json.loads(await api.post(f"{server.url}/v1/chat/completions", {**chat, "response_format": form}))
    text = answer["choices"][0]["message"]["content"]
    is_cut = answer["choices"][0]["finish_reason"] == "length"  # blanks between the parts may use up all tokens
    obeys = text.lstrip().startswith("{") if is_cut else json.loads(text).keys() == {"a", "b"}
    step.check("JSON schema", obeys, note=repr(text[:120]))


async def sleep(step: Step, server: Server, api: ApiClient) -> None:
    wanted = (await read_stream(api, server.body(7), Stream())).text
    for level in (1, 2):
        awake, began = used_gib(step), time.monotonic()
        slept = await status_of(api.post(f"{server.url}/sleep?level={level}"))
        slept_s, asleep = time.monotonic() - began, used_gib(step)
        refused = await status_of(api.post(f"{server.url}/v1/completions", server.body(1, stream=False)))
        began = time.monotonic()
        woke = await status_of(api.post(f"{server.url}/wake_up"))
        woke_s, first = time.monotonic() - began, await read_stream(api, server.body(7), Stream())
        good = (slept, refused, woke) == (200, 503, 200) and first.text == wanted
        note = f"{awake - asleep:.2f} GiB freed, {asleep:.2f} kept; slept in {slept_s:.2f} s, woke in {woke_s:.2f} s, "
        note += f"first text after {first.total_s:.2f} s; statuses {slept} {refused} {woke} {first.error}"
        step.check(f"sleep of level {level}, wake-up, equal text", good, note=note)


def core_of(pid: int) -> int:
    """Return the engine core that a server has started."""
    texts = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(child) for text in texts for child in text.split()]
    (core,) = (child for child in children if b"octavo_engine.process" in Path(f"/proc/{child}/cmdline").read_bytes())
    return core


async def killed_core(step: Step, server: Server, api: ApiClient) -> None:
    """Kill the engine core while all streams have events: each client sees an error soon, and the server ends."""
    found = [Stream() for _ in range(NUM_KILLED)]
    bodies = [server.body(i, max_tokens=1500 if step.is_gpu else 200) for i in range(NUM_KILLED)]
    tasks = [asyncio.create_task(read_stream(api, *pair)) for pair in zip(bodies, found, strict=True)]
    while any(each.first_s == float("inf") for each in found) and not all(task.done() for task in tasks):
        await asyncio.sleep(0.005)
    os.kill(core_of(server.process.pid), signal.SIGKILL)
    began = time.monotonic()
    await asyncio.gather(*tasks)
    after = f"all ended after {time.monotonic() - began:.2f} s; "
    failed = sum(bool(each.error) for each in found)
    note = after + " | ".join(sorted({each.error or f"no error, end {each.end!r}" for each in found}))[:300]
    step.check("core killed: streams that see an error", failed == NUM_KILLED, f"{failed} of {NUM_KILLED}", note=note)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(20)
    code = server.process.poll()
    step.check("core killed: the server ends with an error", bool(code), f"exit code {code}", note=server.last_lines())
    step.figure("memory of the GPU in use then", used_gib(step), "GiB")


CASES = (start, streams, sleep, schema, killed_core)
_servers: list[Server] = []


def run(step: Step, work: Callable[[Step, Server, ApiClient], Awaitable[None]]) -> None:
    """Run a case with a server that runs. If the last one never was ready, no later case starts another."""
    if not _servers or (_servers[-1].is_ready and _servers[-1].process.poll() is not None):
        _servers.append(Server(step))
    server, limit_s = _servers[-1], CASE_S[step.device]

    async def limited() -> None:
        async with ApiClient(server.url) as api, asyncio.timeout(min(limit_s, step.seconds_left())):
            await server.wait_ready(api)
            await work(step, server, api)

    try:
        asyncio.run(limited())
    except TimeoutError:
        if step.seconds_left() <= 0:
            raise LeftOut("no time was left to wait for the server") from None
        raise TimeoutError(f"no answer within {limit_s:.0f} s: {server.last_lines()}") from None


if __name__ == "__main__":
    this = parse_step("serve")
    for work in CASES:
        if re.search(this.match, work.__name__):
            run_case(this, work.__name__, partial(run, work=work))
