"""An engine of two stages answers as one of one stage does; `test_pipeline_parallel_many` has more requests."""

from pathlib import Path

from octavo_engine import SamplingParams
from octavo_engine.runner.capacity import plan_capacity
from octavo_testing.parallel_llm import TEXTS, started_stages
from octavo_testing.tiny_models import make_tiny


def test_two_stages_answer_as_one_and_as_a_dry_run_reports(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path))
    params = [SamplingParams(max_tokens=8, temperature=t, seed=1, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    found = []
    for stages in (1, 2):
        with started_stages(model, stages, max_model_len=96, max_num_batched_tokens=32, max_num_seqs=8) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate(TEXTS[:3], params, use_tqdm=False)])
            capacity, ready, stats = plan_capacity(llm.config), llm.ready_info, llm.stats
    assert found[0] == found[1]
    for name in ("dtype", "max_model_len", "num_blocks", "num_host_blocks", "weights_bytes", "kv_bytes"):
        assert getattr(capacity, name) == getattr(ready, name), name
    assert sum(capacity.rank_weights_bytes) == ready.weights_bytes
    num_prompt_tokens = sum(len(text.encode()) for text in TEXTS[:3])
    assert stats.stage_forward_bytes == 2 * (num_prompt_tokens + 3 * 7) * 64 * 4  # the last token is never an input
    assert stats.stage_back_bytes == 3 * 8 * 64 * 4
    assert capacity.rank_kv_bytes == (ready.kv_bytes // 4, 3 * ready.kv_bytes // 4)  # the first stage has one layer
