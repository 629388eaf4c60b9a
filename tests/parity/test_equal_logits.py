"""A model whose head has few different rows: `LLM` orders equal tokens by id, alone and beside other requests."""

from collections.abc import Iterator
from typing import Any

import pytest
from octavo_engine import LLM, BeamSearchParams, SamplingParams
from octavo_engine.frontend.outputs import PositionLogprobs
from octavo_testing.tiny_models import make_tiny
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 7, 200, 31]
CROWD = [[4, 8, 15], [16, 23, 42, 8, 9, 10], [7] * 20]
FIELDS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 2.0, "seed": 3},
    {"logprobs": 20, "temperature": 1.5, "seed": 1, "top_k": 2},
    {"logprob_token_ids": [69, 30, 31, 100, 3]},
    {"logprobs": 1, "prompt_logprobs": 4},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny("llama", tmp_path_factory.mktemp("model"))
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[:] = head[[i % 7 for i in range(len(head))]].clone()
    head[30:70] = head[30].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, max_logprobs=-1, debug_invariants=True)
    yield llm
    llm.shutdown()


Positions = list[PositionLogprobs | None]


def positions(llm: LLM, fields: dict[str, Any], *, crowd: bool) -> tuple[Positions, Positions, list[int]]:
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields)
    others = SamplingParams(max_tokens=9, temperature=1.0, seed=9, logprobs=2, ignore_eos=True)
    prompts = [*CROWD[:2], PROMPT, *CROWD[2:]] if crowd else [PROMPT]
    every = [params if prompt is PROMPT else others for prompt in prompts]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], every, use_tqdm=False)
    (found,) = [output for output in outputs if output.prompt_token_ids == PROMPT]
    return found.outputs[0].logprobs, found.prompt_logprobs or [], list(found.outputs[0].token_ids)


def order(position: PositionLogprobs | None) -> list[int]:
    """Return all tokens of a position by a sort of their log-probabilities."""
    assert position is not None
    assert len({entry.logprob for entry in position.values()}) <= 7, "tokens are equal"
    return sorted(position, key=lambda token: (-position[token].logprob, token))


def check(found: Positions, whole: Positions, chosen: list[int], size: int, named: list[int] | None = None) -> None:
    """Check tokens and ranks of positions. `whole`: the same positions with all tokens."""
    for position, every, token in zip(found, whole, chosen, strict=True):
        ids = order(every)
        assert position is not None
        assert set(position) == {token, *(ids[:size] if named is None else named)}
        assert {token: entry.rank for token, entry in position.items()} == {i: ids.index(i) + 1 for i in position}


@pytest.mark.parametrize("crowd", [False, True], ids=["alone", "crowd"])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_lists_and_ranks_are_those_of_a_sort(llm: LLM, fields: dict[str, Any], crowd: bool) -> None:
    found, found_prompt, tokens = positions(llm, fields, crowd=crowd)
    plain = {key: value for key, value in fields.items() if "logprob" not in key}
    whole, whole_prompt, same = positions(llm, plain | {"logprobs": -1, "prompt_logprobs": -1}, crowd=False)
    assert tokens == same
    check(found, whole, tokens, fields.get("logprobs", 0), fields.get("logprob_token_ids"))
    if found_prompt:
        check(found_prompt[1:], whole_prompt[1:], PROMPT[1:], fields["prompt_logprobs"])


def test_beams_of_equal_tokens_have_the_lowest_ids(llm: LLM) -> None:
    whole, _, _ = positions(llm, {"logprobs": -1, "max_tokens": 1}, crowd=False)
    params = BeamSearchParams(beam_width=4, max_tokens=1, ignore_eos=True)
    (result,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    assert [beam.tokens[-1] for beam in result.sequences] == order(whole[0])[:4]
