"""N-gram drafts: the search, and the values of `speculative_config`."""

from typing import Any

import numpy as np
import pytest
from octavo_engine.config import SpeculativeConfig
from octavo_engine.core.sequence import Sequence, new_sequence
from octavo_engine.engine_args import resolve_config
from octavo_engine.ngram import NgramProposer, find_drafts
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams


def settings(num: int = 3, least: int = 2, most: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(num_speculative_tokens=num, prompt_lookup_min=least, prompt_lookup_max=most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([9, 1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 7, 2], []),
        ([1, 2, 7, 5, 1, 2, 8, 5, 6, 1, 2], [8, 5, 6]),
        ([3, 1, 2, 7, 7, 7, 4, 1, 2, 8, 8, 8, 3, 1, 2], [7, 7, 7]),
        ([1, 2, 1, 2, 1, 2], [1, 2]),
        ([5], []),
        ([5, 5], []),
        ([5, 5, 5], [5]),
    ],
    ids=["match", "none", "too-short", "latest", "longest", "overlap", "one", "two", "run"],
)
def test_drafts_follow_the_longest_earlier_match(tokens: list[int], expected: list[int]) -> None:
    assert find_drafts(np.array(tokens, dtype=np.int32), settings()) == expected


def sequence(seq_id: int, *tokens: int, grammar: str | None = None, **params: Any) -> Sequence:
    request = EngineRequest(
        request_id=str(seq_id), prompt_token_ids=list(tokens), params=SamplingParams(**params), grammar=grammar
    )
    return new_sequence(request, seq_id=seq_id, key=(0, 0.0, 0, 0), max_len=1000, now=0.0)


def test_a_proposer_follows_its_sequences() -> None:
    proposer, seq = NgramProposer(settings()), sequence(1, 1, 2, 3, 4, 1, 2)
    assert dict(proposer.propose([seq])) == {1: [3, 4, 1]}
    seq.token_ids += [3, 9]
    assert dict(proposer.propose([seq])) == {}
    seq.token_ids += [4, 1, 2, 3] * 20
    assert dict(proposer.propose([seq])) == {1: [4, 1, 2]}
    assert dict(proposer.propose([])) == {}
    assert dict(proposer.propose([seq])) == {1: [4, 1, 2]}


@pytest.mark.parametrize("fields", [{"grammar": "g"}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}], ids=str)
def test_grammars_and_penalties_get_no_drafts(fields: dict[str, Any]) -> None:
    assert dict(NgramProposer(settings()).propose([sequence(1, 1, 2, 3, 1, 2, **fields)])) == {}


@pytest.mark.parametrize(
    ("given", "most", "least"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, 4, 1),
    ],
    ids=str,
)
def test_defaults_are_those_of_vllm(given: dict[str, int], most: int, least: int) -> None:
    config = resolve_config(speculative_config={"method": "ngram", "num_speculative_tokens": 4, **given})
    assert config.speculative_config == settings(4, least, most)
    as_text = resolve_config(speculative_config='{"model": "[ngram]", "num_speculative_tokens": 4}')
    assert as_text.speculative_config == settings(4, 5, 5)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "ngram"}, "num_speculative_tokens.* between 1 and 32"),
        ({**NGRAM, "num_speculative_tokens": 0}, "between 1 and 32, got 0"),
        ({**NGRAM, "num_speculative_tokens": 33}, "between 1 and 32, got 33"),
        ({**NGRAM, "num_speculative_tokens": "3"}, "got '3'"),
        ({**NGRAM, "num_speculative_tokens": True}, "got True"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_m.. .*at least 1, got 0"),
        (
            {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=4 .* prompt_lookup_max=3: lower",
        ),
        ({**NGRAM, "draft_tensor_parallel_size": 1}, "no field 'draft_tensor_parallel_size'.*prompt_lookup_max"),
        ({"num_speculative_tokens": 3}, "names no method: set method='ngram'"),
        ({"model": "org/small", "num_speculative_tokens": 3}, "model='org/small' .*draft models: set method='ngram'"),
        ("[1]", "JSON object"),
        ("{", "no JSON"),
        *(
            ({"method": method, "num_speculative_tokens": 3}, f"method='{method}' .*: set method='ngram'")
            for method in ("eagle", "eagle3", "mtp", "medusa", "suffix", "draft_model", "mlp_speculator", "ngram_gpu")
        ),
    ],
    ids=str,
)
def test_other_settings_are_refused_with_a_remedy(given: Any, named: str) -> None:
    with pytest.raises(StartupError, match=f"^speculative_config.*{named}"):
        resolve_config(speculative_config=given)
