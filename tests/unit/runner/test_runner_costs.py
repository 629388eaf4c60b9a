"""The cost meter finds the costs of a machine from the durations of its steps."""

import random

import numpy as np
import pytest
from octavo_engine.runner.step_costs import CostMeter
from octavo_engine.wire.plan import StepCosts

MACHINE = StepCosts(step_s=0.06, prefill_token_s=0.004, context_token_s=1.9e-6)


def record(meter: CostMeter, *chunks: tuple[int, int], noise: float = 1.0) -> None:
    """Record a step of (start, tokens) chunks that takes the machine's time."""
    seconds = MACHINE.step_s + sum(MACHINE.chunk_s(*chunk) for chunk in chunks)
    start, rows = np.array(chunks, dtype=np.int64).T
    meter.record_forward(rows, start, seconds * noise)


def test_costs_are_unmeasured_until_a_chunk_was_large_enough() -> None:
    meter = CostMeter()
    record(meter, (0, 5))
    record(meter, (5, 1))
    assert meter.current() == StepCosts()
    record(meter, (0, 128))
    assert meter.current().prefill_token_s == pytest.approx(0.004, rel=0.5)


def test_the_costs_of_steps_tokens_and_context_are_separated() -> None:
    meter, noise = CostMeter(), random.Random(0)
    start = 0
    for tokens in (128, 35, 35, 200, 60, 60, 200, 60, 60, 30) * 6:
        record(meter, (start, tokens), noise=noise.gauss(1, 0.05))
        record(meter, (500, 1), (900, 1), noise=noise.gauss(1, 0.05))
        start += tokens
    found = meter.current()
    assert found.step_s == pytest.approx(MACHINE.step_s, rel=0.2)
    assert found.prefill_token_s == pytest.approx(MACHINE.prefill_token_s, rel=0.2)
    assert found.context_token_s == pytest.approx(MACHINE.context_token_s, rel=0.3)


def test_steps_without_a_prompt_enter_the_fit_some_at_a_time() -> None:
    """The first enters at once; then costs change when 16 have come, or with the next prompt."""
    meter = CostMeter()
    record(meter, (0, 128))
    fits = [meter.current()]
    for _ in range(40):
        record(meter, (600, 1), (900, 1))
        fits.append(meter.current())
    changed = [at for at in range(1, 41) if fits[at] != fits[at - 1]]
    assert changed == [1, 17, 33]
    record(meter, (128, 64))
    assert meter.current() != fits[-1]


def test_decoding_for_long_does_not_erase_the_costs_of_prompts() -> None:
    meter = CostMeter()
    for start in range(0, 4000, 100):
        record(meter, (start, 100))
    before = meter.current()
    for start in range(4000, 5000):
        record(meter, (start, 1))
    after = meter.current()
    assert after.chunk_s(4000, 100) == pytest.approx(before.chunk_s(4000, 100), rel=0.1)


def test_costs_are_never_negative() -> None:
    meter, noise = CostMeter(), random.Random(0)
    for _ in range(200):
        chunk = (noise.randrange(5000), noise.randrange(1, 200))
        record(meter, chunk, noise=noise.uniform(0.2, 5))
        costs = meter.current()
        assert min(costs.step_s, costs.prefill_token_s, costs.context_token_s) >= 0


def test_swaps_are_averaged() -> None:
    meter = CostMeter()
    meter.record_swap(2, 0.4)
    meter.record_swap(1, 0.7)
    assert meter.current().swap_block_s == pytest.approx(0.3)


def test_rows_with_log_probabilities_are_averaged_from_the_first() -> None:
    meter = CostMeter()
    meter.record_logprobs(100, 0.1)
    meter.record_logprobs(10, 0.02)
    assert meter.current().logprob_row_s == pytest.approx(0.0012)
    record(meter, (0, 100))
    assert meter.current().logprob_row_s == pytest.approx(0.0012)
