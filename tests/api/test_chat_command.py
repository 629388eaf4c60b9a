"""`octavo chat` and `octavo complete` at a terminal, through a pipe, and without a server."""

import asyncio
import json
import os
import sys

import pytest
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from octavo_testing.terminal import CTRL_D, UP, terminal

pytestmark = pytest.mark.slow

OCTAVO = ("-m", "octavo_server.cli.main")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return ScriptedClient(write_byte_model(tmp_path_factory.mktemp("byte-model")))


@pytest.fixture
async def served(engine):
    engine.reset()
    async with serving(engine) as served:
        yield served


@pytest.fixture
def env(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


async def run(*argv, stdin=b""):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *OCTAVO, *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin)
    return process.returncode, out.decode(), err.decode()


def prompts(engine):
    return [bytes(i for i in request.prompt_token_ids if i < 256).decode() for request in engine.requests]


def asked(*contents, system=""):
    """The prompt that the template renders from questions and answers in turn."""
    turns = [("user", "assistant")[i % 2] + "\n" + content + "\n" for i, content in enumerate(contents)]
    return (f"system\n{system}\n" if system else "") + "".join(turns) + "assistant\n"


async def test_terminal_session_supports_all_commands(served, env, tmp_path):
    served.engine.replies = ["First answer."]
    file = tmp_path / "talk.json"
    async with terminal(*OCTAVO, "chat", "--url", served.url, "--system", "Be brief.", env=env) as shown:
        await shown.until(f"{MODEL} at {served.url}/v1")
        await shown.until("> ")
        shown.type("one question")
        await shown.until("First answer.")
        await shown.until("> ")
        served.engine.replies = ["Second answer."]
        shown.type("another")
        await shown.until("Second answer.")
        shown.type("/retry")
        await shown.until("Second answer.")
        shown.type("/stats")
        await shown.until("all 3 answers: 44 tokens")
        shown.type(f"/save {file}")
        await shown.until("4 messages")
        shown.type("/clear")
        await shown.until("deleted")
        shown.type(f"/load {file}")
        await shown.until("4 messages were loaded")
        shown.type("/nothing")
        await shown.until("/nothing")
        shown.type("/help")
        await shown.until("/system [TEXT]")
        shown.type("/exit")
        assert await shown.exit_code() == 0
    second, third = prompts(served.engine)[1:]
    assert second == asked("one question", "First answer.", "another", system="Be brief.")
    assert third == second
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


async def test_ctrl_c_stops_only_the_answer(served, env):
    served.engine.replies = ["A long answer that is never read to its end."]
    served.engine.hold_at = 6
    async with terminal(*OCTAVO, "chat", "--url", served.url, env=env) as shown:
        await shown.until("> ")
        shown.type("tell me")
        await shown.until("A long")
        await served.engine.held.wait()
        await shown.interrupt()
        await shown.until("[stopped]")
        await served.engine.aborted.get()
        served.engine.hold_at = None
        await shown.until("> ")
        shown.type("go on")
        await shown.until("its end.")
        await shown.until("> ")
        shown.press(CTRL_D)
        assert await shown.exit_code() == 0
    assert prompts(served.engine)[1] == asked("tell me", "A long", "go on")


async def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_exits(served, env):
    async with terminal(*OCTAVO, "chat", "--url", served.url, env=env) as shown:
        await shown.until("> ")
        shown.press(b"half a line")
        await shown.until("half a line")
        await shown.interrupt()
        await shown.until("Ctrl-D exits)")
        await shown.until("> ")
        shown.type("whole")
        await shown.until("Hello, world!")
        await shown.until("> ")
        await shown.interrupt()
        await shown.until("> ")
        await shown.interrupt()
        assert await shown.exit_code() == 0
    assert prompts(served.engine) == [asked("whole")]


async def test_arrow_key_recalls_input_of_an_earlier_session(served, env, tmp_path):
    for keys in (b"remember me\n", UP + b"\n"):
        async with terminal(*OCTAVO, "chat", "--url", served.url, env=env) as shown:
            await shown.until("> ")
            shown.press(keys)
            await shown.until("Hello, world!")
            await shown.until("> ")
            shown.press(CTRL_D)
            assert await shown.exit_code() == 0
    assert prompts(served.engine) == [asked("remember me")] * 2
    assert (tmp_path / "state/octavo/chat_history").stat().st_mode & 0o077 == 0


async def test_pipe_gets_only_one_answer_per_line(served):
    code, out, err = await run("chat", "--url", served.url, stdin=b"one\n\ntwo\n")
    assert (code, out, err) == (0, "Hello, world!\nHello, world!\n", "")
    assert prompts(served.engine)[1] == asked("one", "Hello, world!", "two")


async def test_pipe_can_be_one_message(served):
    code, out, _ = await run("chat", "--url", served.url, "--stdin", "whole", stdin=b"one\ntwo\n")
    assert (code, out) == (0, "Hello, world!\n")
    assert prompts(served.engine) == [asked("one\ntwo")]


async def test_quick_accepts_vllm_s_names_and_sampling_flags(served):
    flags = ("--model-name", MODEL, "--system-prompt", "S", "--api-key", "k", "--temperature", "0", "--max-tokens", "5")
    code, out, err = await run("chat", "--url", f"{served.url}/v1", *flags, "--stop", "x", "-q", "hi")
    assert (code, out, err) == (0, "Hello\n", "")
    (request,) = served.engine.requests
    assert (request.params.temperature, request.params.max_tokens, request.params.stop) == (0, 5, ["x"])


async def test_complete_continues_each_line(served):
    code, out, _ = await run("complete", "--url", served.url, "--max-tokens", "50", "-q", "Once")
    assert (code, out) == (0, "Hello, world!\n")
    code, out, err = await run("complete", "--url", served.url, "--stats", stdin=b"a\nb\n")
    assert (code, out) == (0, "Hello, world!\n" * 2)
    assert err.count("1 prompt tokens, 14 answer tokens; first after") == 2
    assert prompts(served.engine) == ["Once", "a", "b"]


async def test_complete_works_at_a_terminal(served, env):
    async with terminal(*OCTAVO, "complete", "--url", served.url, env=env) as shown:
        await shown.until("> ")
        shown.type("/retry")
        await shown.until("no text to retry")
        shown.type("a \\")
        await shown.until(". ")
        shown.type("b")
        await shown.until("Hello, world!")
        await shown.until("> ")
        shown.type("/retry")
        await shown.until("Hello, world!")
        await shown.until("> ")
        shown.press(CTRL_D)
        assert await shown.exit_code() == 0
    assert prompts(served.engine) == ["a \nb"] * 2


async def test_closed_output_ends_the_command_quietly(served):
    """The pipe of `octavo chat < questions | head -n 1`."""
    served.engine.hold_at = 5
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *OCTAVO, "chat", "--url", served.url, "-q", "hi"),
        stdout=writer,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writer)
    assert await asyncio.to_thread(os.read, reader, 1) == b"H"
    os.close(reader)
    served.engine.resumed.set()
    assert await process.stderr.read() == b""
    assert await process.wait() == 1


async def test_failure_in_mid_answer_keeps_the_text_and_shows_the_reason(served):
    served.engine.fail_at = 5
    code, out, err = await run("chat", "--url", served.url, stdin=b"one\ntwo\n")
    assert (code, out) == (1, "Hello\n")
    assert "scripted" in err
    assert len(served.engine.requests) == 1


async def test_missing_server_is_one_line_with_the_start_command(unused_port):
    code, out, err = await run("chat", "--url", f"http://127.0.0.1:{unused_port}/v1", "-q", "hi")
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert f"octavo serve --port {unused_port}" in line
    assert "Connection refused" in line


async def test_router_without_models_is_reported_as_starting():
    async with routing(forward={"max_hold_time": 0.2}) as routed:
        code, _, err = await run("chat", "--url", routed.url, "-q", "hi")
    assert code == 1
    assert "lists no model yet" in err


@pytest.fixture
def unused_port():
    from octavo_testing.serve_command import free_port

    return free_port()


async def test_missing_key_is_reported(engine):
    engine.reset()
    async with serving(engine, api_key=("secret",)) as served:
        code, _, err = await run("chat", "--url", served.url, "-q", "hi")
        assert code == 1
        assert "--api-key" in err
        assert (await run("chat", "--url", served.url, "--api-key", "secret", "-q", "hi"))[0] == 0


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
async def test_invalid_url_is_reported(url):
    code, _, err = await run("chat", "--url", url, "-q", "hi")
    assert code == 1
    assert url in err
