"""Many bad clients at once, at a real process: however they leave or stay, their resources are released."""

import json
import socket
import struct
from contextlib import ExitStack

import psutil
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import octavo_serve
from octavo_testing.target import target

pytestmark = pytest.mark.slow

NUM_CLIENTS = 12
FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"),
    *("--num-gpu-blocks-override", "256", "--max-num-seqs", "16", "--uvicorn-log-level", "error"),
    *("--request-timeout", "0.5", "--slow-client-timeout", "0.5"),
)
HELD = ('octavo:kv_blocks{state="in_use"}', "vllm:num_requests_running", "vllm:num_requests_waiting")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    folder = tmp_path_factory.mktemp("impatient")
    (folder / "model").mkdir()
    model = str(write_byte_model(folder / "model"))
    with octavo_serve(folder, model, *FLAGS) as process, target(process) as served:
        yield served


def request(**fields):
    body = json.dumps({"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "temperature": 1, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def vanish_within_the_body(client):
    client.sendall(request()[:-20])
    client.close()


def reset_within_the_body(client):
    client.sendall(request()[:-20])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def vanish_within_the_stream(client):
    client.sendall(request(stream=True))
    client.recv(100)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def stay_half_open(client):
    client.sendall(request()[:-20])


def stop_writing(client):
    client.sendall(request(stream=True))
    client.shutdown(socket.SHUT_WR)


def never_read(client):
    client.sendall(request(stream=True, n=2, logprobs=20))


def say_nothing(client):
    del client


@pytest.mark.parametrize(
    "behave",
    [
        vanish_within_the_body,
        reset_within_the_body,
        vanish_within_the_stream,
        stay_half_open,
        stop_writing,
        never_read,
        say_nothing,
    ],
)
def test_resources_of_bad_clients_are_released(impatient, behave):
    server = psutil.Process(impatient.process.process.pid)
    impatient.http.get("/health")
    before = server.num_fds()
    address = impatient.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address[0], int(address[1])))
            behave(client)
        answer = impatient.http.post("/v1/completions", json={"prompt": "others", "max_tokens": 2})
        assert answer.status_code == 200
        if behave is not say_nothing:
            impatient.metrics_when(lambda metrics: all(metrics[name] == 0 for name in HELD))
    impatient.metrics_when(lambda _: server.num_fds() <= before)
    impatient.metrics_when(lambda _: impatient.http.get("/load").json() == {"server_load": 0})
