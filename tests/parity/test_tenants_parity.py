"""Answers of requests of three tenants, preempted, cut and swapped, equal those of each request alone."""

from pathlib import Path
from typing import Any

import pytest
from octavo_engine.loop.start import find_loader, start_core
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

NUM_REQUESTS = 40


def requests() -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[3 + (number * 7 + i) % 90 for i in range(5 + number % 30)],
            params=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            if number % 8 != 1
            else SamplingParams(temperature=1, seed=number, n=6, max_tokens=24, ignore_eos=True),
            tenant="abc"[number % 3],
        )
        for number in range(NUM_REQUESTS)
    ]


def answers(core: Any, given: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for request in given:
        core.add(request)
        for output in core.step().outputs:
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    while core.has_work():
        for output in core.step().outputs:
            assert output.finish_reason in (None, "length")
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_answers_of_competing_tenants_equal_those_alone(tmp_path: Path, mode: str) -> None:
    folder = make_tiny("llama", tmp_path)
    common: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "debug_invariants": True, "max_model_len": 64}
    pressed = {"max_num_seqs": 8, "num_gpu_blocks_override": 16, "preemption_mode": mode, "swap_space": 0.01}
    core, _ = start_core(EngineConfig(model=str(folder), **common, **pressed), find_loader(DEFAULT_LOADER))
    found = answers(core, requests())
    stats = core.stats()
    assert stats.preemptions > 10
    assert (stats.preemptions_swap > 0) == (mode == "swap")
    assert stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests())
    core.shutdown()
    alone, _ = start_core(EngineConfig(model=str(folder), **common), find_loader(DEFAULT_LOADER))
    for request in requests():
        expected = answers(alone, [request])
        assert expected == {output: found[output] for output in expected}
    alone.shutdown()
