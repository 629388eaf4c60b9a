"""Drafts of a draft model: the model as its own draft is always right, and no draft model changes an output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.core.replay import replay_file
from octavo_engine.wire.plan import StepCosts
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.copy_prompts import outputs_of
from octavo_testing.gguf_checkpoints import tiny_model as gguf_model
from octavo_testing.gguf_checkpoints import write_tiny_gguf
from octavo_testing.tiny_models import VOCAB, make_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
#: Values of `least_share`: with 0 a test always drafts, with 2 never.
Least = Callable[[float], None]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def set_least(monkeypatch: pytest.MonkeyPatch) -> Least:
    def change(share: float) -> None:
        def least_share(num_seqs: int, costs: StepCosts) -> float:
            return share

        monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", least_share)

    change(0)
    return change


@contextmanager
def open_llm(model: Path, draft: Path | None = None, **settings: Any) -> Iterator[LLM]:
    speculation = None if draft is None else {"model": str(draft), "num_speculative_tokens": 4}
    common = {
        "dtype": "float32",
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "debug_invariants": True,
        "num_threads": 1,
    }
    llm = LLM(str(model), **(common | settings), speculative_config=speculation)
    yield llm
    llm.shutdown()


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + (7 * i + 5 * n) % 250 for i in range(n)]} for n in lengths]


def outputs(llm: LLM, given: list[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[tuple[Any, ...]]:
    return outputs_of(llm.generate(given, params, use_tqdm=False))


def assert_all_accepted(llm: LLM, *, at_least: int) -> None:
    assert sum(llm.stats.accepted_draft_tokens) == llm.stats.draft_tokens >= at_least


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
@pytest.mark.usefixtures("set_least")
def test_a_model_as_its_own_draft_is_always_right(root: Path, eager: bool) -> None:
    folder = make_tiny("llama", root)
    with open_llm(folder) as plain, open_llm(folder, folder, enforce_eager=eager) as drafting:
        for group in (prompts(21), prompts(5, 32, 40)):
            assert outputs(drafting, group) == outputs(plain, group)
        assert_all_accepted(drafting, at_least=80)
        assert drafting.stats.steps < plain.stats.steps / 3


@pytest.mark.parametrize("drafts_before", [True, False])
def test_drafts_after_a_prefix_hit(root: Path, set_least: Least, drafts_before: bool) -> None:
    """The second prompt is the first one with its output, whose blocks have no KV of the draft model without drafts."""
    folder = make_tiny("llama", root)
    with open_llm(folder, folder) as llm:
        set_least(0 if drafts_before else 2)
        first = llm.generate(prompts(40), GREEDY, use_tqdm=False)[0]
        assert first.prompt_token_ids is not None
        assert (llm.stats.draft_tokens > 0) == drafts_before
        set_least(0)
        outputs(llm, [{"prompt_token_ids": [*first.prompt_token_ids, *first.outputs[0].token_ids, 9]}])
        assert llm.stats.prefix_cache_hits == 64
        assert_all_accepted(llm, at_least=20)


@pytest.mark.usefixtures("set_least")
def test_drafts_after_a_fork(root: Path) -> None:
    folder = make_tiny("llama", root)
    likeliest = SamplingParams(n=3, temperature=1, top_k=1, max_tokens=30, ignore_eos=True)
    with open_llm(folder, folder) as llm:
        outputs(llm, prompts(21), likeliest)
        assert llm.stats.cow_copies == 2
        assert_all_accepted(llm, at_least=60)


@pytest.mark.parametrize(("mode", "swap_space"), [("swap", 0.01), ("recompute", 0.0)])
@pytest.mark.usefixtures("set_least")
def test_drafts_after_a_preemption(root: Path, mode: str, swap_space: float) -> None:
    folder = make_tiny("llama", root)
    sizes = {"num_gpu_blocks_override": 10, "preemption_mode": mode, "swap_space": swap_space}
    with open_llm(folder) as plain, open_llm(folder, folder, **sizes) as llm:
        group = prompts(30, 32, 45)
        assert outputs(llm, group) == outputs(plain, group)
        assert (llm.stats.swapped_in_blocks > 0) == (mode == "swap")
        assert llm.stats.preemptions
        assert_all_accepted(llm, at_least=30)


def test_drafts_after_steps_without_drafts(root: Path, tmp_path: Path, set_least: Least) -> None:
    """Only tries draft. The draft model then computes the tokens since the last try, if need be in several steps."""
    folder = make_tiny("llama", root)
    set_least(0.9)
    with (
        open_llm(folder) as plain,
        open_llm(folder, folder, max_num_batched_tokens=6, trace=str(tmp_path / "trace")) as llm,
    ):
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        assert outputs(llm, prompts(21), params) == outputs(plain, prompts(21), params)
        assert 0 < llm.stats.drafts < 10
    assert replay_file(tmp_path / "trace").ok


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "grammar": {"temperature": 1, "seed": 4, "structured_outputs": StructuredOutputs(regex="[a-z ]{10,30}[0-9]{3}")},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.usefixtures("set_least")
def test_a_random_draft_model_changes_no_output(root: Path, name: str) -> None:
    folder, draft = make_tiny("llama", root), make_tiny("llama", root / "other", seed=1)
    params = SamplingParams(max_tokens=30, **PARAMS[name])
    with open_llm(folder) as plain, open_llm(folder, draft) as drafting:
        for group in (prompts(9), prompts(5, 32, 40)):
            assert outputs(drafting, group, params) == outputs(plain, group, params)
        assert sum(drafting.stats.accepted_draft_tokens) < drafting.stats.draft_tokens / 2


@pytest.mark.usefixtures("set_least")
def test_a_draft_model_of_transformers_or_in_blocks(root: Path, tmp_path: Path) -> None:
    folder = make_tiny("llama", root)
    with open_llm(folder) as plain, open_llm(folder, folder, model_impl="transformers") as drafting:
        assert outputs(drafting, prompts(9)) == outputs(plain, prompts(9))
        assert_all_accepted(drafting, at_least=20)
    write_tiny_gguf(tmp_path / "m.gguf", "llama", gguf_model("llama", vocab_size=VOCAB), qtype="Q8_0")
    with (
        open_llm(folder, dtype="bfloat16") as plain,
        open_llm(folder, tmp_path / "m.gguf", dtype="bfloat16") as drafting,
    ):
        assert outputs(drafting, prompts(9)) == outputs(plain, prompts(9))
        assert drafting.stats.draft_tokens


@pytest.mark.usefixtures("set_least")
def test_sleeping_drops_both_models(root: Path) -> None:
    folder = make_tiny("llama", root)
    with open_llm(folder, folder, enable_sleep_mode=True, swap_space=0.001) as llm:
        want = outputs(llm, prompts(21))
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert outputs(llm, prompts(21)) == want
        assert_all_accepted(llm, at_least=60)
