"""The laws of fairness between tenants, for any loads that keep both busy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqResult, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams

COSTS = StepCosts(step_s=0.02, prefill_token_s=0.001, context_token_s=1e-6)
NUM_WAITING = 4

loads = st.fixed_dictionaries({"prompt": st.integers(1, 100), "output": st.integers(1, 60), "n": st.integers(1, 6)})


class Tenants:
    """A scheduler in which each tenant always has waiting requests of one shape."""

    def __init__(
        self,
        loads: dict[str, dict[str, int]],
        weights: dict[str, float],
        adapters: dict[str, str] | None = None,
        **config: object,
    ) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=200, **config))  # type: ignore[arg-type]
        self.loads, self.weights, self.adapters, self.serial = loads, weights, adapters or {}, 0
        self.service = dict.fromkeys(loads, 0)
        self.waits: dict[str, int] = {}

    def step(self) -> None:
        state = self.scheduler._state
        for tenant in self.loads:
            active = state.tenants.active.get(tenant)
            while active is None or len(active.waiting) < NUM_WAITING:
                self.add(tenant)
                active = state.tenants.active[tenant]
        plan = self.scheduler.step(float(self.serial), COSTS)
        for step in plan.seqs:
            self.service[state.seqs[step.seq_id].group.request.tenant] += 1 + step.num_computed
        self.scheduler.commit(result_of(plan), 0.0)

    def add(self, tenant: str) -> None:
        load, self.serial = self.loads[tenant], self.serial + 1
        params = SamplingParams(max_tokens=load["output"], n=load["n"], ignore_eos=True, seed=0)
        request = EngineRequest(
            request_id=str(self.serial),
            prompt_token_ids=[self.serial, *range(load["prompt"] - 1)],
            params=params,
            tenant=tenant,
            weight=self.weights.get(tenant, 1.0),
            adapter=self.adapters.get(tenant, ""),
        )
        self.scheduler.add(request, 0.0)


def result_of(plan: StepPlan) -> StepResult:
    seqs = [SeqResult(seq_id=step.seq_id, token_ids=[9]) for step in plan.seqs if step.sample]
    return StepResult(step_id=plan.step_id, seqs=seqs, costs=COSTS)


@settings(max_examples=15)
@given(loads, loads, st.sampled_from([8, 16]), st.sampled_from([64, 1024]), st.sampled_from([4, 16]))
def test_counters_of_two_waiting_tenants_differ_by_a_bounded_amount(
    one: dict[str, int], two: dict[str, int], places: int, blocks: int, tokens_per_place: int
) -> None:
    """The quantum, a prompt and a step bound the lead at which places are taken back; growth until then doubles it."""
    budget = places * tokens_per_place
    busy = Tenants(
        {"one": one, "two": two},
        {},
        max_num_seqs=places,
        num_blocks=blocks,
        block_size=4,
        max_num_batched_tokens=budget,
    )
    bound = budget + max(one["prompt"], two["prompt"]) + budget + places
    for _ in range(120):
        busy.step()
        active = busy.scheduler._state.tenants.active
        if all(name in active and active[name].waiting for name in busy.loads):
            assert abs(active["one"].counter - active["two"].counter) <= 2 * bound


def test_three_busy_tenants_get_service_by_their_weights() -> None:
    loads = {name: {"prompt": 20, "output": 30, "n": 1} for name in "abc"}
    busy = Tenants(loads, {"c": 2.0}, max_num_seqs=16, num_blocks=512, block_size=4, max_num_batched_tokens=128)
    for _ in range(600):
        busy.step()
    total = sum(busy.service.values())
    for name, part in (("a", 0.25), ("b", 0.25), ("c", 0.5)):
        assert abs(busy.service[name] / total - part) <= 0.03


@pytest.mark.parametrize(("max_loras", "adapters"), [(1, "xy"), (1, "xyz"), (2, "xyz")])
def test_tenants_whose_adapters_do_not_fit_into_one_step_get_equal_service(max_loras: int, adapters: str) -> None:
    """While an adapter waits, no other one begins, so that the running sequences end and the adapter gets its turn."""
    loads = {
        str(i): {"prompt": 20, "output": output, "n": 1}
        for i, output in zip(range(len(adapters)), (60, 5, 30), strict=False)
    }
    of_tenants = dict(zip(loads, adapters, strict=True))
    sizes = {"max_num_seqs": 16, "num_blocks": 512, "block_size": 4, "max_num_batched_tokens": 128}
    busy = Tenants(loads, {}, of_tenants, max_loras=max_loras, **sizes)
    for _ in range(600):
        busy.step()
    total = sum(busy.service.values())
    for name in loads:
        assert abs(busy.service[name] / total - 1 / len(loads)) <= 0.1


def test_the_model_itself_runs_beside_adapters_that_take_turns() -> None:
    loads = {name: {"prompt": 20, "output": 30, "n": 1} for name in "abc"}
    sizes = {"max_num_seqs": 16, "num_blocks": 512, "block_size": 4, "max_num_batched_tokens": 128}
    busy = Tenants(loads, {}, {"a": "x", "b": "y"}, max_loras=1, **sizes)
    for _ in range(600):
        busy.step()
    total = sum(busy.service.values())
    assert abs(busy.service["a"] - busy.service["b"]) <= 0.05 * total
    assert min(busy.service.values()) >= 0.2 * total
    assert busy.service["c"] == max(busy.service.values())  # it may use what the adapters leave
