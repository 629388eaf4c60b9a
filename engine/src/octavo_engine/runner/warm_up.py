"""Plans of the steps that a device runs before the engine is ready, so that no request waits for a kernel to compile.

They are the largest prefill, the most sequences, a decode step and a step with both. They write to blocks that hold no
cache entry yet, so nothing has to be undone, and the last plan drops their sequences.
"""

from octavo_engine.runner.memory_plan import MemoryPlan
from octavo_engine.settings.config import EngineConfig, most_seqs
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams

_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)  # needs all buffers of the sampler


def warm_up_plans(config: EngineConfig, memory: MemoryPlan, *, num_tokens: int) -> list[StepPlan]:
    """Plan the steps. `num_tokens`: most tokens of a step. Every plan keeps within the engine's limits."""
    longest = min(num_tokens, memory.max_model_len)
    most = min(most_seqs(config), num_tokens)
    share = min(longest, num_tokens // most, max(1, memory.max_model_len - 1))
    blocks_each = -(-(share + 1) // config.block_size)
    ids = range(1, 1 + max(1, min(most, memory.kv.num_blocks // blocks_each)))
    tables = {i: list(range((i - 1) * blocks_each, i * blocks_each)) for i in ids}
    plans = [
        _prefill([_new(0, longest)], {0: list(range(-(-longest // config.block_size)))}),
        _prefill([_new(i, share) for i in ids], tables, dropped=[0]),
    ]
    if share < memory.max_model_len:
        decodes = [SeqStep(seq_id=i, start=share, num_tokens=1, sample=True) for i in ids]
        again = SeqStep(seq_id=ids[-1], start=0, num_tokens=share, sample=True)
        plans += [StepPlan(step_id=0, seqs=decodes), StepPlan(step_id=0, seqs=[*decodes[:-1], again])]
    return [*plans, StepPlan(step_id=0, dropped_seqs=list(ids))]


def _new(seq_id: int, num_tokens: int) -> NewSeq:
    return NewSeq(seq_id=seq_id, token_ids=[0] * num_tokens, num_prompt_tokens=num_tokens, params=_PARAMS)


def _prefill(new: list[NewSeq], tables: dict[int, list[int]], dropped: list[int] | None = None) -> StepPlan:
    steps = [
        SeqStep(seq_id=n.seq_id, start=0, num_tokens=len(n.token_ids), sample=True, block_ids=[tables[n.seq_id]])
        for n in new
    ]
    return StepPlan(step_id=0, new_seqs=new, seqs=steps, dropped_seqs=dropped or [])
