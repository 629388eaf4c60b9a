"""`AsyncLLM` over a real engine core process whose executor plays a script."""

import asyncio
import random
import subprocess
import sys
import threading
from contextlib import aclosing

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import ContextLengthExceeded, EngineDead, InvalidRequest, StartupError
from octavo_engine.wire.sampling import RequestOutputKind, SamplingParams
from octavo_testing.core_process import collect, joined_text, running
from octavo_testing.gate import Valve
from octavo_testing.scripted import EOS, VALVE, scripted, text_ids, write_byte_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(tmp_path_factory, scripted_tmp):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), load_format="dummy", max_model_len=512, debug_invariants=True)


async def until_idle(llm):
    """Run one more request, so that all messages sent before it are processed."""
    await collect(llm, "x", scripted("."), "until_idle")
    return llm.stats


async def test_deltas_join_to_the_whole(llm):
    deltas = await collect(llm, "hi", scripted("What a fine day! 🎉 ça va"))
    assert joined_text(deltas) == "What a fine day! 🎉 ça va"
    assert [i for d in deltas for i in d.outputs[0].token_ids] == text_ids("What a fine day! 🎉 ça va", eos=True)
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert not any("\N{REPLACEMENT CHARACTER}" in d.outputs[0].text for d in deltas)


async def test_cumulative_outputs_grow_and_final_is_one(llm):
    cumulative = await collect(llm, "hi", scripted("four"), kind="cumulative")
    texts = [output.outputs[0].text for output in cumulative]
    assert texts == sorted(texts, key=len)
    assert texts[-1] == "four"
    (final,) = await collect(llm, "hi", scripted("four"), kind="final")
    assert (final.outputs[0].text, final.outputs[0].finish_reason, final.request_id) == ("four", "stop", "r")
    assert (final.prompt, final.prompt_token_ids) == ("hi", text_ids("hi"))


async def test_n_sequences_each_end_once(llm):
    outputs = await collect(llm, "hi", scripted("one", "two", "three", n=3))
    assert [joined_text(outputs, i) for i in range(3)] == ["one", "two", "three"]
    ends = [c.index for output in outputs for c in output.outputs if c.finished()]
    assert sorted(ends) == [0, 1, 2]


async def test_stop_string_across_tokens_ends_one_sequence_and_frees_it(llm):
    outputs = await collect(llm, "hi", scripted("go STOP no", "x" * 9, n=2, stop=["STOP"]))
    ends = {c.index: (c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs if c.finished()}
    assert joined_text(outputs, 0) == "go "
    assert joined_text(outputs, 1) == "x" * 9
    assert ends == {0: ("stop", "STOP"), 1: ("stop", None)}
    assert (await until_idle(llm)).in_use_blocks == 0


async def test_max_tokens_ends_with_reason_length(llm):
    outputs = await collect(llm, "hi", scripted("endless", max_tokens=3, ignore_eos=True))
    assert (joined_text(outputs), outputs[-1].outputs[0].finish_reason) == ("end", "length")


async def test_closing_the_iterator_aborts_in_the_core(llm):
    stream = llm.generate("hi", scripted("x" * 400, max_tokens=400, eos=False), "gone")
    await anext(stream)
    await stream.aclose()
    stats = await until_idle(llm)
    assert (stats.running, stats.waiting, stats.in_use_blocks) == (0, 0, 0)


async def test_cancelling_the_reader_aborts_in_the_core(llm, gate):
    params = scripted("x" * 400, eos=False, max_tokens=400, extra_args=gate.wait_at(2))
    first = asyncio.Event()

    async def read():
        async for _ in llm.generate("hi", params, "cancelled"):
            first.set()

    reader = asyncio.create_task(read())
    await first.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    gate.open()
    assert (await until_idle(llm)).in_use_blocks == 0


async def test_a_failed_step_ends_its_request_and_the_engine_keeps_serving(llm):
    outputs = await collect(llm, "hi", scripted("abcdef", extra_args={"fail_at": 2}))
    assert joined_text(outputs) == "ab"
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert "scripted failure" in outputs[-1].error
    assert joined_text(await collect(llm, "hi", scripted("fine"))) == "fine"


async def test_a_slow_reader_gets_missed_output_in_one_piece(llm):
    stream = llm.generate("hi", scripted("a long answer"), "slow", kind="delta")
    outputs = [await anext(stream)]
    await collect(llm, "hi", scripted("an answer that takes longer"), "other")
    outputs += [output async for output in stream]
    assert joined_text(outputs) == "a long answer"
    assert len(outputs) < len("a long answer")


async def test_logprobs_come_as_dicts(llm):
    (output,) = await collect(llm, "ab", scripted("cd", logprobs=2, prompt_logprobs=1), kind="final")
    first = output.outputs[0].logprobs[0]
    assert list(first) == [ord("c"), ord("d")]
    assert (first[ord("c")].decoded_token, first[ord("c")].rank, first[ord("d")].rank) == ("c", 1, 2)
    assert output.outputs[0].cumulative_logprob == pytest.approx(-0.25 * len(output.outputs[0].token_ids))
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1]) == [ord("b")]


async def test_the_parameters_choose_the_kind_of_outputs(llm):
    def shown(kind):
        return collect(llm, "hi", scripted("abc", output_kind=kind), kind=None)

    assert joined_text(await shown(RequestOutputKind.DELTA)) == "abc"
    assert (await shown(RequestOutputKind.CUMULATIVE))[-1].outputs[0].text == "abc"
    (final,) = await shown(RequestOutputKind.FINAL_ONLY)
    assert final.outputs[0].text == "abc"


async def test_bad_requests_are_refused_and_leave_no_trace(llm):
    cases = [
        ("", SamplingParams(), InvalidRequest, "empty"),
        ([999], SamplingParams(), InvalidRequest, "999"),
        ("x" * 512, SamplingParams(max_tokens=None), ContextLengthExceeded, "maximum context length is 512 tokens"),
        ("x" * 500, SamplingParams(max_tokens=13), ContextLengthExceeded, "you requested 13 output tokens"),
        ("x", SamplingParams(logprobs=21), InvalidRequest, "21.*maximum of 20"),
        ("x", SamplingParams(logit_bias={300: 1}), InvalidRequest, "logit_bias.*300"),
    ]
    for prompt, params, error, words in cases:
        with pytest.raises(error, match=words):
            await collect(llm, prompt, params)
    assert (await until_idle(llm)).in_use_blocks == 0


async def test_requests_with_equal_ids_run_side_by_side(llm, gate):
    first = llm.generate("hi", scripted("xyz", extra_args=gate.wait_at(1)), "same")
    await anext(first)
    gate.open()
    assert joined_text(await collect(llm, "hi", scripted("abc"), "same")) == "abc"
    assert [o async for o in first][-1].outputs[0].text == "xyz"


async def test_abort_ends_all_requests_with_the_id(config, tmp_path, monkeypatch):
    """Each step waits for the output of the one before, so that the abort arrives long before the last one."""
    valve = Valve(tmp_path / "valve")
    monkeypatch.setenv(VALVE, str(valve.path))
    async with running(config) as llm:
        first = llm.generate("hi", scripted("x" * 199), "same")
        valve.allow_steps()
        await anext(first)
        others = [("same", "y" * 199), ("other", "abc")]
        waiting = [asyncio.create_task(collect(llm, "hi", scripted(text), name)) for name, text in others]
        while llm.num_unfinished < 3:
            await asyncio.sleep(0)
        await llm.abort("unknown")
        await llm.abort("same")
        valve.allow_steps()
        async for output in first:
            end = output.outputs[0].finish_reason
            valve.allow_steps()
        valve.open()
        ends = [outputs[-1].outputs[0].finish_reason for outputs in await asyncio.gather(*waiting)]
        assert [end, *ends] == ["abort", "abort", "stop"]


async def test_max_tokens_none_fills_the_context(llm):
    (output,) = await collect(llm, "x" * 500, scripted("y" * 20, eos=False, max_tokens=None), kind="final")
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (12, "length")


async def test_many_streams_stay_separate(llm):
    words = [f"answer number {i}" for i in range(40)]
    streams = (collect(llm, f"q{i}", scripted(word), f"many-{i}") for i, word in enumerate(words))
    assert [joined_text(outputs) for outputs in await asyncio.gather(*streams)] == words
    stats = await until_idle(llm)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


async def test_random_cancellations_leave_no_state(llm):
    chance = random.Random(0)

    async def visit(i):
        params = scripted("x" * 60, "y" * 30, n=2, stop=["yyyyyyyyyy"])
        stream = llm.generate(f"prompt {i % 7} " * (i % 9 + 1), params, f"visit-{i}", kind="delta")
        async with aclosing(stream):
            leave_after = chance.choice([0, 1, 5, 20, 1000])
            for _ in range(leave_after):
                if await anext(stream, None) is None:
                    return
            if chance.random() < 0.3:
                await llm.abort(f"visit-{i}")

    await asyncio.gather(*(visit(i) for i in range(200)))
    stats = await until_idle(llm)
    assert (stats.running, stats.waiting, stats.in_use_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert llm._streams == {}


async def test_unseeded_requests_get_different_seeds(llm):
    params = SamplingParams(extra_args={"replies": [[ord("a"), EOS], [ord("b"), EOS]]})
    texts = {joined_text(await collect(llm, "hi", params)) for _ in range(20)}
    assert texts == {"a", "b"}
    assert params.seed is None


async def test_a_kill_ends_every_stream_and_later_calls(config, scripted_tmp):
    async with running(config) as llm:
        params = scripted("abcdef", extra_args={"kill_at": 3})
        waiting = asyncio.gather(*(collect(llm, "hi", params, f"k{i}") for i in range(3)), return_exceptions=True)
        ends = await asyncio.wait_for(waiting, timeout=120)
        assert all(isinstance(end, EngineDead) for end in ends)
        assert llm.is_dead
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await collect(llm, "hi", scripted("x"))
    assert not list(scripted_tmp.glob("octavo-*"))


async def test_two_engines_are_independent(config):
    async with running(config) as one, running(config) as two:
        await one.shutdown()
        assert joined_text(await collect(two, "hi", scripted("still here"))) == "still here"


@pytest.mark.parametrize(
    ("loader", "words", "code"),
    [
        ("load_refusing", "lm_head.weight is truncated", "OutOfMemory"),
        ("load_crashing", "exited with code 1 while starting", "StartupFailed"),
    ],
)
async def test_a_core_that_cannot_start_reports_the_reason(config, scripted_tmp, loader, words, code):
    threads = threading.active_count()
    with pytest.raises(StartupError, match=words) as raised:
        async with running(config, f"octavo_testing.scripted:{loader}"):
            pass
    assert raised.value.code == code
    assert not list(scripted_tmp.glob("octavo-*"))
    assert threading.active_count() <= threads + 1


async def test_import_needs_neither_torch_nor_transformers():
    heavy = ("torch", "transformers")
    code = f"import sys, octavo_engine.frontend.async_llm; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
