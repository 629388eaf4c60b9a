"""Adapters of an engine core in another process, loaded and unloaded beside running requests."""

import asyncio
import random
from pathlib import Path

import pytest
import pytest_asyncio
from octavo_engine import AsyncLLM, InvalidRequest, SamplingParams
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import AdapterNameTaken, ModelNotFound, Unavailable
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import VOCAB, make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PROMPT = {"prompt_token_ids": random.Random(0).choices(range(3, VOCAB), k=20)}
NUM_ADAPTERS, NUM_STREAMS, NUM_CHANGES = 12, 16, 1000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("adapters")
    return [write_adapter(parent / f"{i}", llama_pairs(seed=i)) for i in range(NUM_ADAPTERS)]


@pytest_asyncio.fixture(loop_scope="module")
async def llm(tmp_path_factory):
    model = make_tiny("llama", tmp_path_factory.mktemp("model"))
    config = resolve_config(
        model=str(model), dtype="bfloat16", enable_lora=True, num_gpu_blocks_override=600, enable_sleep_mode=True,
        num_threads=1, max_loras=NUM_ADAPTERS,
    )  # fmt: skip
    engine = await AsyncLLM.start(config)
    yield engine
    await engine.shutdown()


async def tokens(llm: AsyncLLM, adapter: str = "", max_tokens: int = 12) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async for output in llm.generate(PROMPT, params, "id", kind="final", adapter=adapter):
        assert output.error is None
        return output.outputs[0].token_ids
    raise AssertionError("no output")


async def core_bytes(llm: AsyncLLM) -> int:
    status = Path(f"/proc/{llm._core._process.pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


async def test_names_follow_loads_and_unloads(llm, folders):
    base = await tokens(llm)
    with pytest.raises(ModelNotFound):
        await tokens(llm, "a")
    await llm.load_adapter("a", str(folders[0]))
    await llm.load_adapter("same", f"file://{folders[0]}")
    first = await tokens(llm, "a")
    assert first != base
    assert await tokens(llm, "same") == first
    with pytest.raises(AdapterNameTaken):
        await llm.load_adapter("a", str(folders[1]))
    await llm.load_adapter("a", str(folders[1]), in_place=True)
    assert await tokens(llm, "a") not in (base, first)
    assert await tokens(llm, "same") == first, "the other name keeps the content"
    await llm.unload_adapter("same")
    with pytest.raises(ModelNotFound):
        await llm.unload_adapter("same")
    await llm.unload_adapter("a")
    assert await tokens(llm) == base


async def test_an_adapter_that_cannot_be_loaded_changes_nothing(llm, folders, tmp_path):
    await llm.load_adapter("a", str(folders[0]))
    first = await tokens(llm, "a")
    wide = write_adapter(tmp_path / "wide", llama_pairs(rank=17))
    for path, words in ((wide, "--max-lora-rank 16"), (tmp_path / "none", "no such")):
        with pytest.raises(InvalidRequest, match=words):
            await llm.load_adapter("a", str(path), in_place=True)
    assert await tokens(llm, "a") == first
    await llm.unload_adapter("a")


async def test_running_requests_of_an_unloaded_adapter_finish(llm, folders):
    await llm.load_adapter("a", str(folders[0]))
    expected = await tokens(llm, "a", 100)
    running = [asyncio.create_task(tokens(llm, "a", 100)) for _ in range(3)]
    while llm.num_unfinished < 3:
        await asyncio.sleep(0)
    await llm.unload_adapter("a")
    with pytest.raises(ModelNotFound):
        await tokens(llm, "a")
    assert await asyncio.gather(*running) == [expected] * 3


async def test_no_adapter_is_loaded_while_the_engine_sleeps(llm, folders):
    await llm.load_adapter("a", str(folders[0]))
    first = await tokens(llm, "a")
    await llm.sleep(2)
    with pytest.raises((Unavailable, InvalidRequest), match="sleep"):
        await llm.load_adapter("b", str(folders[1]))
    await llm.wake_up()
    assert await tokens(llm, "a") == first
    await llm.unload_adapter("a")


async def test_a_thousand_changes_under_load(llm, folders):
    """No answer is wrong, no request that named a loaded adapter fails, and memory stays where it was after 50."""
    expected = {}
    for index, folder in enumerate(folders):
        await llm.load_adapter(f"{index}", str(folder))
        expected[f"{index}"] = await tokens(llm, f"{index}")
        await llm.unload_adapter(f"{index}")
    expected[""] = await tokens(llm)
    drawn, is_over, answers = random.Random(1), asyncio.Event(), 0

    async def stream() -> None:
        nonlocal answers
        while not is_over.is_set():
            name = drawn.choice(["", *llm.adapters])
            assert await tokens(llm, name) == expected[name]
            answers += 1

    streams = [asyncio.create_task(stream()) for _ in range(NUM_STREAMS)]
    early = 0
    for change in range(NUM_CHANGES):
        name = f"{drawn.randrange(NUM_ADAPTERS)}"
        if name in llm.adapters:
            await llm.unload_adapter(name)
        else:
            await llm.load_adapter(name, str(folders[int(name)]))
        assert not any(each.done() for each in streams)
        if change == 50:
            early = await core_bytes(llm)
    is_over.set()
    await asyncio.gather(*streams)
    assert answers > 100
    assert await core_bytes(llm) < 1.05 * early
