"""Sleep of an engine process: memory returns to the system, and answers after waking equal those before."""

import asyncio
from contextlib import aclosing

import psutil
import pytest
from octavo_engine.offline.llm import LLM
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import InvalidRequest, Unavailable
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.core_process import collect, running
from octavo_testing.scripted import LOADER, scripted, write_byte_model
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}
SHARE = 0.8  # of the released bytes by which the resident memory must fall: the allocator keeps some pages


async def greedy(llm, prompt=PROMPT):
    (output,) = await collect(llm, prompt, GREEDY, kind="final")
    return output.outputs[0].token_ids


@pytest.mark.real_model
async def test_memory_returns_to_the_system_and_answers_stay(scripted_tmp):
    config = EngineConfig(
        dtype="float32", max_model_len=1024, kv_cache_memory_bytes=48 << 20, max_step_ms=0.0, enable_sleep_mode=True
    )
    fill = {"prompt_token_ids": [i % 1000 + 10 for i in range(1000)]}
    async with running(config, "octavo_engine.runner.load:load") as llm:
        process = psutil.Process(llm._core.pid)
        before = await greedy(llm)
        sizes = {1: llm.ready_info.kv_bytes, 2: llm.ready_info.kv_bytes + llm.ready_info.weights_bytes}
        for level, released in sizes.items():
            await greedy(llm, fill)
            awake = process.memory_info().rss
            await llm.sleep(level)
            assert awake - process.memory_info().rss > SHARE * released
            assert llm.stats.in_use_blocks == 0
            await llm.wake_up()
            assert await greedy(llm) == before


async def test_a_failed_reload_can_be_repeated(tmp_path, scripted_tmp):
    folder = make_tiny("llama", tmp_path)
    sizes = {"num_threads": 1, "num_gpu_blocks_override": 20, "dtype": "float32"}
    config = EngineConfig(model=str(folder), **sizes, enable_sleep_mode=True)
    (file,) = folder.glob("*.safetensors")
    async with running(config, "octavo_engine.runner.load:load") as llm:
        before = await greedy(llm)
        await llm.sleep(2)
        file.rename(tmp_path / "moved")
        with pytest.raises(Unavailable, match="could not be restored"):
            await llm.wake_up()
        assert llm.sleeping_tags == {"weights", "kv_cache"}
        with pytest.raises(Unavailable, match="sleeps"):
            await greedy(llm)
        (tmp_path / "moved").rename(file)
        await llm.wake_up(["weights"])
        assert llm.sleeping_tags == {"kv_cache"}
        await llm.wake_up()
        assert (llm.sleeping_tags, await greedy(llm)) == (frozenset(), before)


async def test_a_stream_ends_once_when_the_engine_sleeps(tmp_path, scripted_tmp, gate):
    config = EngineConfig(model=str(write_byte_model(tmp_path)), load_format="dummy", max_model_len=512)
    async with running(config) as llm:
        with pytest.raises(InvalidRequest, match="enable_sleep_mode"):
            await llm.sleep()
    enabled = EngineConfig(model=config.model, load_format="dummy", max_model_len=512, enable_sleep_mode=True)
    async with running(enabled) as llm:
        unending = scripted("a" * 150, extra_args=gate.wait_at(3))
        async with aclosing(llm.generate("x", unending, "r")) as stream:
            await anext(stream)
            sleeping = asyncio.create_task(llm.sleep())
            await asyncio.sleep(0)
            gate.open()
            rest = [output async for output in stream]
            await sleeping
        assert [o.outputs[0].finish_reason for o in rest if o.finished] == ["abort"]
        assert (llm.num_unfinished, llm.sleeping_tags) == (0, {"kv_cache"})
        await llm.wake_up()
        await collect(llm, "x", scripted("a"))


def test_llm_sleeps_and_keeps_enqueued_prompts(tmp_path):
    llm = LLM(str(write_byte_model(tmp_path)), loader=LOADER, load_format="dummy", enable_sleep_mode=True)
    llm.enqueue("a", scripted("kept"))
    llm.sleep()
    for call in (lambda: llm.generate("b", scripted("x")), llm.wait_for_completion):
        with pytest.raises(Unavailable, match="wake_up"):
            call()
    llm.wake_up(tags=["kv_cache"])
    assert [output.outputs[0].text for output in llm.wait_for_completion(use_tqdm=False)] == ["kept"]
    llm.shutdown()


def test_llm_does_not_sleep_without_sleep_mode(tmp_path):
    llm = LLM(str(write_byte_model(tmp_path)), loader=LOADER, load_format="dummy")
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(InvalidRequest, match="enable_sleep_mode"):
            call()
    llm.shutdown()
