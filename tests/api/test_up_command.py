"""`octavo up` as a process: several engines and a router start, serve, crash and stop together."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from octavo_testing.server import events
from octavo_testing.up_command import SERVING, all_exited, octavo_up

pytestmark = pytest.mark.slow

BODY = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}


def complete(up, headers=None):
    answer = httpx.post(f"{up.url}/v1/completions", headers=headers, json={"prompt": "hello " * 8, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return answer


def stream_text(up):
    with httpx.stream("POST", f"{up.url}/v1/completions", json=BODY, timeout=240) as answer:
        return "".join(answer.iter_text())


def cores(up):
    return [child for child in up.family if "octavo_engine.process.main" in child.cmdline()]


def test_up_serves_behind_a_router_until_ctrl_c(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2", "--served-model-name", "tiny", "--router-args=--routing-headers") as up:
        up.wait_for_log(SERVING)
        complete(up)
        up.until(lambda: complete(up).headers["x-octavo-rung"] == "exact", "the router knows what was cached")
        assert up.metric("octavo_router_endpoints_admitted") == 2
        assert f"try: curl {up.url}/v1/chat/completions" in up.log
        assert {line.split("|")[0].strip() for line in up.log.splitlines()} == {
            "up",
            "router",
            "replica-0",
            "replica-1",
        }
        family = up.family
        assert len(family) == 5  # the router; two servers, each with its core
        up.interrupt()
        assert up.exit_code() == 0
        assert all_exited(family)


def test_router_checks_the_api_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("admin: sk-1\nbob: sk-2\n")
    with octavo_up(tmp_path, "--replicas", "1", "--api-key-file", str(keys), "--cache-isolation") as up:
        up.wait_for_log(SERVING)
        assert httpx.post(f"{up.url}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert "-H 'Authorization: Bearer KEY'" in up.log
        assert complete(up, headers={"authorization": "Bearer sk-2"}).status_code == 200
        router, replica = up.child("router"), up.child("replica-0")
        secret = router.environ()["OCTAVO_ROUTER_SECRET"]
        assert replica.environ()["OCTAVO_ROUTER_SECRET"] == secret
        assert secret not in up.log + str([child.cmdline() for child in up.family])
        up.interrupt()
        assert up.exit_code() == 0


def test_ctrl_c_lets_streams_finish(tmp_path):
    with octavo_up(tmp_path, "--replicas", "1") as up, ThreadPoolExecutor() as pool:
        up.wait_for_log(SERVING)
        (core,) = cores(up)
        core.suspend()
        stream = pool.submit(stream_text, up)
        up.until(lambda: up.metric("octavo_router_inflight") == 1, "the stream has begun")
        up.interrupt()
        up.wait_for_log("draining")
        core.resume()
        *_, last, done = events(stream.result(240))
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert up.exit_code() == 0


def test_second_ctrl_c_stops_at_once(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2", "--drain-timeout", "600") as up, ThreadPoolExecutor() as pool:
        up.wait_for_log(SERVING)
        for core in cores(up):
            core.suspend()
        stream = pool.submit(stream_text, up)
        up.until(lambda: up.metric("octavo_router_inflight") == 1, "the stream has begun")
        family = up.family
        up.interrupt()
        up.wait_for_log("draining")
        up.interrupt()
        assert up.exit_code() == 128 + signal.SIGINT
        assert all_exited(family)
        with pytest.raises(httpx.TransportError):
            stream.result(240)


def test_crashed_process_is_logged_and_restarted(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2") as up:
        up.wait_for_log(SERVING)
        killed = [up.child("replica-1"), up.child("router")]
        for child in killed:
            child.kill()
        up.wait_for_log("replica-1 was killed by SIGKILL; restarting it in 1 s")
        up.wait_for_log("router was killed by SIGKILL; restarting it in 1 s")
        up.until(lambda: len(up.family) == 5, "all are there again")
        assert not {*killed} & {*up.family}
        up.until(lambda: _admits(up, 2), "the router has both replicas")
        complete(up)
        up.interrupt()
        assert up.exit_code() == 0


def _admits(up, num):
    try:
        return up.metric("octavo_router_endpoints_admitted") == num
    except httpx.TransportError:
        return False


def test_death_of_the_supervisor_ends_all_children(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2") as up:
        up.wait_for_log(SERVING)
        family = up.family
        up.process.kill()
        assert all_exited(family)


def test_ctrl_c_stops_engines_that_are_starting(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2") as up:
        up.wait_for_log("starting the router")
        up.until(lambda: up.family, "something is started")
        family = up.family
        up.interrupt()
        assert up.exit_code() == 0
        assert all_exited(family)


def test_engine_that_cannot_start_ends_all_with_its_reason(tmp_path):
    with octavo_up(tmp_path, "--replicas", "2", "--chat-template", "{% no template", "--log-format", "text") as up:
        assert up.exit_code() == 1
        last = up.log.split("replica-0 could not start: it ended with exit code 1")[1]
        assert "template" in last


def test_port_in_use_is_reported_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        with octavo_up(tmp_path, "--replicas", "2", "--port", port) as up:
            assert up.exit_code() == 1
            assert up.log.startswith(f"octavo: cannot listen on 127.0.0.1:{port}")
            assert up.log.count("\n") == 1


def test_json_lines_stay_json(tmp_path):
    with octavo_up(tmp_path, "--replicas", "1", "--log-format", "json") as up:
        up.wait_for_log(SERVING)
        up.interrupt()
        assert up.exit_code() == 0
        assert "1 replica serves" in up.log
        sources = {json.loads(line)["source"] for line in up.log.splitlines()}
    assert sources == {"up", "router", "replica-0"}
    assert not psutil.pid_exists(up.process.pid)
