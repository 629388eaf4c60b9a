"""The laws of a step's shares, for any costs, prompts and limits."""

from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.core.prompt_shares import PromptShares
from octavo_engine.wire.plan import SeqStep, StepCosts
from octavo_testing.simulation import Simulation

cost, token_cost = st.floats(0, 0.1), st.floats(1e-9, 0.1)
measured = st.builds(StepCosts, step_s=cost, prefill_token_s=token_cost, context_token_s=st.floats(0, 1e-3))
prompts = st.lists(st.tuples(st.integers(0, 100_000), st.integers(2, 10_000)), min_size=1, max_size=12)
decodes = st.lists(st.integers(0, 10_000).map(lambda n: SeqStep(seq_id=0, start=n, num_tokens=1, sample=True)))


@given(measured, st.integers(0, 100_000), st.floats(0, 1000))
def test_tokens_within_a_time_are_as_many_as_fit(costs: StepCosts, start: int, seconds: float) -> None:
    tokens = costs.tokens_within(start, seconds)
    token_s = costs.chunk_s(start + tokens, 1)
    assert costs.chunk_s(start, tokens) <= seconds + 2e-6 * token_s + 1e-9 * seconds
    assert costs.chunk_s(start, tokens + 1) >= seconds - 2e-6 * token_s - 1e-9 * seconds


@given(measured, st.floats(1e-3, 10), decodes, prompts, st.integers(1, 4096))
def test_shares_keep_the_limits_and_the_first_prompt_advances(
    costs: StepCosts, limit_s: float, beside: list[SeqStep], waiting: list[tuple[int, int]], budget: int
) -> None:
    shares = PromptShares(limit_s, costs, beside)
    rest_s = costs.step_s + sum(costs.chunk_s(step.start, 1) for step in beside)
    (start, todo), *later = waiting
    reserved = shares.reserve_first(start, todo, budget)
    left, spent_s, longest_token_s = budget - reserved, 0.0, costs.chunk_s(start, 1)
    for later_start, later_todo in later:
        want = shares.later(later_start, later_todo, left) if left else 0
        assert 0 <= want <= min(left, later_todo)
        shares.spend(later_start, want)
        left -= want
        spent_s += costs.chunk_s(later_start, want)
        longest_token_s = max(longest_token_s, costs.chunk_s(later_start, 1))
    first = shares.first(start, todo, left + reserved, alone=False)
    assert 1 <= first <= min(todo, left + reserved)
    spent_s += costs.chunk_s(start, first)
    # Each of the two kinds of shares may exceed its time by the one token that it computes at least.
    assert rest_s + spent_s <= max(limit_s, 2 * rest_s) * 1.000001 + 2 * longest_token_s
    half_s = (max(limit_s, 2 * rest_s) - rest_s) / 2
    assert first >= reserved or costs.chunk_s(start, first + 1) >= 0.999 * half_s


@given(
    measured | st.just(StepCosts()),
    st.sampled_from([1.0, 50.0, 500.0]),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 16),
)
def test_no_prompt_starves(costs: StepCosts, limit_ms: float, lengths: list[int], budget: int) -> None:
    """The oldest unfinished request advances in every step; all end with the tokens that they generate alone."""
    sim = Simulation(costs=costs, max_step_ms=limit_ms, max_num_batched_tokens=budget, num_blocks=24)
    for number, length in enumerate(lengths):
        sim.add(f"r{number}", [number % 3] * length)
        oldest = sim.scheduler._state.running[:1]
        planned = {step.seq_id for step in sim.tick().seqs}
        assert all(seq.seq_id in planned for seq in oldest)
    sim.drain()
    sim.verify()
