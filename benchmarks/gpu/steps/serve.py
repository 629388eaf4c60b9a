"""`octavo serve` with random weights in Qwen3-0.6B's shape: its start, streams, a schema, sleep, a killed engine core.

All cases use one server, so they run in this process, and each of its requests has a limit of time. The first case
starts it, and a later one again if it has ended.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.step import Step, parse_step, run_case

START_S = {"cuda": 90.0, "cpu": 120.0}
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
    """A stream as its client sees it: text, end, and the seconds to the first event and to the end."""

    text: str = ""
    end: str = ""
    error: str = ""
    first_s: float = float("inf")
    total_s: float = float("inf")
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        return self.is_done and self.end == "length" and not self.error


class Server:
    def __init__(self, step: Step) -> None:
        self.step, self.began = step, time.monotonic()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.log = step.work / f"serve-{self.port}.log"
        sizes = "--max-model-len 2048" if step.is_gpu else "--max-model-len 256 --num-gpu-blocks-override 200"
        flags = f"{FLAGS} --device {step.device} --port {self.port} {sizes}".split()
        command = [sys.executable, "-m", "octavo_server.cli.main", "serve", str(write_model(step)), *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.is_ready = self._wait_ready()

    def _wait_ready(self) -> bool:
        limit = min(START_S[self.step.device], self.step.seconds_left() - 5)
        while time.monotonic() - self.began < limit and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health", timeout=2.0)[0] == 200:
                    return True
            time.sleep(0.1)
        return False

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def stream(self, body: dict[str, Any], found: Stream | None = None) -> Stream:
        began, found = time.monotonic(), found or Stream()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            try:
                payload = json.dumps({**body, "stream": True})
                connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
                for event in _events(connection.getresponse()):
                    found.first_s = min(found.first_s, time.monotonic() - began)
                    found.is_done |= event == "[DONE]"
                    content = {} if event == "[DONE]" else json.loads(event)
                    found.error = json.dumps(content["error"]) if "error" in content else found.error
                    for choice in content.get("choices", ()):
                        found.text += choice["text"]
                        found.end = choice["finish_reason"] or found.end
            except (OSError, http.client.HTTPException, ValueError) as error:
                found.error = f"{type(error).__name__}: {error}"
        found.total_s = time.monotonic() - began
        return found

    def streams(self, bodies: list[dict[str, Any]]) -> list[Stream]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.stream, bodies))

    def body(self, i: int, **more: Any) -> dict[str, Any]:
        words, count = (20, 64) if self.step.is_gpu else (3, 8)
        prompt = f"text {i} of a story about {'abc ' * words}"
        return {"model": "m", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0.0, **more}

    def last_lines(self) -> str:
        return " / ".join(self.log.read_text(errors="replace").splitlines()[-4:])[-500:]


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        text = line.decode().strip()
        if text:
            yield text.removeprefix("data:").strip()


_servers: list[Server] = []


def server_of(step: Step) -> Server:
    """Return a server that runs. Raises RuntimeError if it does not start; no later case tries again."""
    if not _servers or (_servers[-1].is_ready and _servers[-1].process.poll() is not None):
        _servers.append(Server(step))
    if not _servers[-1].is_ready:
        code = _servers[-1].process.poll()
        raise RuntimeError(f"the server is not ready, exit code {code}: {_servers[-1].last_lines()}")
    return _servers[-1]


def used_gib(step: Step) -> float:
    if not step.is_gpu:
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def start(step: Step) -> None:
    before = used_gib(step)
    server = server_of(step)
    step.figure("ready after", time.monotonic() - server.began, "s")
    step.figure("memory of the GPU in use when ready", used_gib(step) - before, "GiB")
    metrics = server.request("GET", "/metrics")[1].decode().splitlines()
    step.figure("stages", note="; ".join(x for x in metrics if "startup" in x and not x.startswith("#"))[:500])
    log = server.log.read_text(errors="replace").splitlines()
    for level, most in (("INFO", 14), ("WARNING", 6), ("ERROR", 6)):
        for text in [each for each in log if f" {level} " in each][:most]:
            step.figure(f"log, {level}", note=text[:260])


def streams(step: Step) -> None:
    server = server_of(step)
    alone = server.stream(server.body(0))
    if not alone.is_whole:
        return step.fail("first request", alone.error or f"it has ended without [DONE], reason {alone.end!r}")
    step.check("first request", True, alone.total_s, "s", f"first token: {alone.first_s:.3f} s")
    bodies = [server.body(i, **(SAMPLED if i % 2 else {})) for i in range(NUM_STREAMS)]
    found = server.streams(bodies)
    good = sum(each.is_whole for each in found)
    note = "; ".join({each.error for each in found if each.error}) or f"slowest {max(x.total_s for x in found):.2f} s"
    step.check(f"{NUM_STREAMS} streams at once", good == NUM_STREAMS, f"{good} of {NUM_STREAMS}", note=note[:300])
    again = server.streams(bodies[:NUM_AGAIN])
    equal = sum(ours.text == first.text and ours.is_whole for ours, first in zip(again, found, strict=False))
    note = "bf16: a batch of another size may round otherwise"
    return step.figure("the same streams again, fewer at once", f"{equal} of {NUM_AGAIN}", "texts equal", note)


def schema(step: Step) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 1}
    status, data = server_of(step).request("POST", "/v1/chat/completions", {**chat, "response_format": form})
    choice = json.loads(data)["choices"][0] if status == 200 else {"finish_reason": "", "message": {"content": "{}"}}
    text = choice["message"]["content"]
    is_cut = choice["finish_reason"] == "length"  # blanks between the parts may use up all tokens
    obeys = text.lstrip().startswith("{") if is_cut else json.loads(text).keys() == {"a", "b"}
    step.check("JSON schema", obeys, status, note=repr(text[:120] if status == 200 else data[:200]))


def sleep(step: Step) -> None:
    server = server_of(step)
    wanted = server.stream(server.body(7)).text
    for level in (1, 2):
        awake, began = used_gib(step), time.monotonic()
        slept, _ = server.request("POST", f"/sleep?level={level}")
        slept_s, asleep = time.monotonic() - began, used_gib(step)
        refused, _ = server.request("POST", "/v1/completions", server.body(1))
        began = time.monotonic()
        woke, _ = server.request("POST", "/wake_up")
        woke_s, first = time.monotonic() - began, server.stream(server.body(7))
        good = (slept, refused, woke) == (200, 503, 200) and first.text == wanted
        note = f"{awake - asleep:.2f} GiB freed, {asleep:.2f} kept; slept in {slept_s:.2f} s, woke in {woke_s:.2f} s, "
        note += f"first text after {first.total_s:.2f} s; statuses {slept} {refused} {woke} {first.error}"
        step.check(f"sleep of level {level}, wake-up, equal text", good, note=note)


def cores_of(pid: int) -> list[int]:
    """Return the engine cores that a server has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"octavo_engine.process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def killed_core(step: Step) -> None:
    """Kill the engine core while all streams have events: each client sees an error soon, and the server ends."""
    server, found = server_of(step), [Stream() for _ in range(NUM_KILLED)]
    bodies = [server.body(i, max_tokens=1500 if step.is_gpu else 200) for i in range(NUM_KILLED)]
    threads = [threading.Thread(target=server.stream, args=pair) for pair in zip(bodies, found, strict=True)]
    for thread in threads:
        thread.start()
    while any(each.first_s == float("inf") for each in found) and any(thread.is_alive() for thread in threads):
        time.sleep(0.005)
    (core,) = cores_of(server.process.pid)
    os.kill(core, signal.SIGKILL)
    began = time.monotonic()
    for thread in threads:
        thread.join()
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


if __name__ == "__main__":
    this = parse_step("serve")
    for work in CASES:
        if re.search(this.match, work.__name__):
            run_case(this, work.__name__, work)
