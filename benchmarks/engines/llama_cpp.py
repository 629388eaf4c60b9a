"""llama.cpp's server over loopback HTTP: llama_cpp.py LLAMA_SERVER MODEL.gguf SLOTS SLOT_TOKENS THREADS.

Two servers with different settings run: one with many slots, each with a KV stream of its own, for concurrent requests
(a unified KV cache is many times slower on a CPU), and one with a single long slot for one stream. Only one of them
works at a time.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError

from worker import Generate, serve

LOAD_TIMEOUT_S, REQUEST_TIMEOUT_S, LONG_SLOT_TOKENS = 120, 900, 4096


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """One `llama-server`, ready once constructed."""

    def __init__(self, executable: str, model: str, threads: str, *flags: str) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        command = [executable, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads]
        self._process = subprocess.Popen([*command, "-b", "2048", "-ub", "512", *flags], stdout=sys.stderr)
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: {command}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=2) as answer:
                return bool(json.load(answer).get("status") == "ok")
        except (URLError, OSError):
            return False

    def complete(self, ids: list[int], max_tokens: int) -> int:
        body = {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    executable, model, slots, slot_tokens, threads = sys.argv[1:]
    servers: list[Server] = []

    def load() -> Generate:
        crowd_flags = ("-np", slots, "-c", str(int(slots) * int(slot_tokens)), "--no-kv-unified")
        servers.append(Server(executable, model, threads, *crowd_flags))
        servers.append(Server(executable, model, threads, "-np", "1", "-c", str(LONG_SLOT_TOKENS)))
        crowd, single = servers
        pool = ThreadPoolExecutor(int(slots))

        def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
            server = crowd if len(prompts) > 1 else single
            return list(pool.map(lambda ids: server.complete(ids, max_tokens), prompts))

        return generate

    try:
        serve(load)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
