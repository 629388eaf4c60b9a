"""However the parent ends, the engine core ends with it, and no temporary file is left; an idle core uses no CPU."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import collect, running
from octavo_testing.gate import Gate
from octavo_testing.scripted import scripted, write_byte_model

pytestmark = pytest.mark.slow

#: Prints the core's pid and waits: before the core has loaded ("loading"), idle, or during a step.
PARENT = """
import asyncio, json, sys
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.settings.config import EngineConfig
from octavo_engine.process.client import CoreProcess
from octavo_testing.gate import Gate
from octavo_testing.scripted import scripted

async def main(model, state, script):
    config = EngineConfig(model=model, load_format="dummy")
    if state == "loading":
        core = await CoreProcess.launch(config, "octavo_testing.scripted:load_never")
        print(core.pid, flush=True)
        await core.ready()
    llm = await AsyncLLM.start(config, loader="octavo_testing.scripted:load")
    if state == "stepping":
        params = scripted("abc", extra_args=json.loads(script))
        await anext(llm.generate("hi", params, "r"))
    print(llm._core.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory, scripted_tmp):
    return write_byte_model(tmp_path_factory.mktemp("model"))


def start_parent(model: Path, state: str, gate: Gate) -> tuple[subprocess.Popen[str], psutil.Process]:
    argv = [sys.executable, "-c", PARENT, str(model), state, json.dumps(gate.wait_at(1))]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize(
    ("signum", "state"),
    [
        (signal.SIGKILL, "loading"),
        (signal.SIGKILL, "idle"),
        (signal.SIGKILL, "stepping"),
        (signal.SIGTERM, "stepping"),
        (signal.SIGINT, "loading"),
    ],
)
def test_no_process_or_file_outlives_the_parent(model, scripted_tmp, tmp_path, state, signum):
    gate = Gate(tmp_path / "gate")
    parent, core = start_parent(model, state, gate)
    with parent:
        parent.send_signal(signum)
        _, alive = psutil.wait_procs([core], timeout=120)
    gate.open()
    assert not alive
    assert not list(scripted_tmp.glob("octavo-*"))


def test_ctrl_c_in_the_terminal_leaves_the_core_to_its_parent(model, scripted_tmp, tmp_path):
    gate = Gate(tmp_path / "gate")
    parent, core = start_parent(model, "idle", gate)
    with parent:
        core.send_signal(signal.SIGINT)
        os.kill(parent.pid, 0)
        assert core.is_running()
        os.killpg(parent.pid, signal.SIGKILL)
        psutil.wait_procs([core], timeout=120)
    gate.open()
    assert not core.is_running()
    assert not list(scripted_tmp.glob("octavo-*"))


async def test_idle_core_uses_no_cpu(model):
    async with running(EngineConfig(model=str(model), load_format="dummy")) as llm:
        await collect(llm, "x", scripted("."), "settles")
        core = psutil.Process(llm._core.pid)
        before = core.cpu_times()
        await asyncio.sleep(2)  # the measurement itself
        after = core.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.02
