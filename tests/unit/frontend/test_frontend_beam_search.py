"""`beam_search` against all possible outputs of a model with four tokens."""

import itertools
import math
import random
from unittest.mock import Mock

import octavo_engine.frontend.beam_search
import pytest
from octavo_engine.frontend.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, beam_search
from octavo_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo_engine.frontend.request_builder import TokenizedPrompt
from octavo_engine.wire.errors import OctavoError

EOS = 3
PROMPT = (9, 9)
STEPS = 4


def next_logprobs(tokens: tuple[int, ...]) -> list[float]:
    weights = [random.Random(str((tokens, i))).random() for i in range(4)]
    return [math.log(weight / sum(weights)) for weight in weights]


def generate(prompts, params):
    """Report the most likely tokens, as an engine does."""
    found = []
    for prompt in prompts:
        values = next_logprobs(tuple(prompt.token_ids))
        top = sorted(range(4), key=lambda i: -values[i])[: params.logprobs]
        position = {i: Logprob(values[i], rank) for rank, i in enumerate(top, 1)}
        completion = CompletionOutput(index=0, token_ids=[top[0]], logprobs=[position], finish_reason="length")
        found.append(output(prompt, completion))
    return found


def output(prompt, completion, error=None):
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=prompt.token_ids,
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(arrival_s=0.0),
        error=error,
    )


def search(**fields) -> list[BeamSearchSequence]:
    options = {"generate": generate, "decode": str, "eos_token_id": EOS, "max_model_len": 100}
    options |= {name: fields.pop(name) for name in list(fields) if name in options}
    prompt = TokenizedPrompt(text=None, token_ids=list(PROMPT))
    (result,) = beam_search([prompt], BeamSearchParams(**{"max_tokens": STEPS, **fields}), **options)
    return result.sequences


def all_outputs(length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Return scores and tokens of all outputs that end with their only end token or have STEPS tokens."""
    found = []
    for length in range(1, STEPS + 1):
        for tokens in itertools.product(range(4), repeat=length):
            ends = tokens[-1] == EOS
            if EOS in tokens[:-1] or (not ends and length < STEPS):
                continue
            total = sum(next_logprobs(PROMPT + tokens[:i])[token] for i, token in enumerate(tokens))
            found.append((total / (len(PROMPT) + length - ends) ** length_penalty, PROMPT + tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_wide_search_finds_the_best_of_all_outputs(length_penalty: float) -> None:
    beams = search(beam_width=200, length_penalty=length_penalty)
    assert [tuple(beam.tokens) for beam in beams] == [tokens for _, tokens in all_outputs(length_penalty)][:200]
    ends = {beam.tokens[-1] == EOS: (beam.finish_reason, beam.stop_reason) for beam in beams}
    assert ends == {True: ("stop", EOS), False: ("length", None)}


def test_a_narrow_search_returns_as_many_beams_as_its_width() -> None:
    beams = search(beam_width=2, ignore_eos=True)
    assert [len(beam.tokens) for beam in beams] == [len(PROMPT) + STEPS] * 2
    assert beams[0].cum_logprob >= beams[1].cum_logprob
    assert [len(beam.logprobs) for beam in beams] == [STEPS] * 2
    assert beams[0].text == str(beams[0].tokens)


def test_a_width_of_one_is_greedy() -> None:
    tokens = PROMPT
    for _ in range(STEPS):
        values = next_logprobs(tokens)
        tokens = (*tokens, values.index(max(values)))
    (beam,) = search(beam_width=1, ignore_eos=True)
    assert tuple(beam.tokens) == tokens


class KeepAll(BeamSearch):
    """Keeps all completed beams until the end, as the definition of the search does."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.all = []

    def advance(self, outputs):
        self._completed = []
        super().advance(outputs)
        self.all += self._completed

    def best(self):
        return [beam for _, beam in self._best([(self._score(b.tokens, b.cum_logprob), b) for b in self.all])]


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_search_keeps_few_beams_and_finds_the_same(width, length_penalty, monkeypatch) -> None:
    made = Mock(side_effect=BeamSearchSequence)
    monkeypatch.setattr(octavo_engine.frontend.beam_search, "BeamSearchSequence", made)
    prompt = TokenizedPrompt(text=None, token_ids=list(PROMPT))
    params = BeamSearchParams(beam_width=width, max_tokens=30, length_penalty=length_penalty)
    kept, reference = (cls(prompt, params, eos_token_id=EOS, max_model_len=100) for cls in (BeamSearch, KeepAll))
    while prompts := kept.prompts():
        assert [p.token_ids for p in reference.prompts()] == [p.token_ids for p in prompts]
        made.reset_mock()
        kept.advance(generate(prompts, kept.step_params))
        assert made.call_count <= 2 * width
        assert len(kept.beams) <= 2 * width
        reference.advance(generate(prompts, kept.step_params))
    assert len(reference.all) > width
    assert [beam.tokens for beam in kept.best()] == [beam.tokens for beam in reference.best()]


def test_beams_without_logprobs_are_the_same() -> None:
    prompt = TokenizedPrompt(text=None, token_ids=list(PROMPT))
    params = BeamSearchParams(beam_width=2, max_tokens=STEPS)
    searched = BeamSearch(prompt, params, eos_token_id=EOS, max_model_len=100, keeps_logprobs=False)
    while prompts := searched.prompts():
        searched.advance(generate(prompts, searched.step_params))
    assert [beam.tokens for beam in searched.best()] == [beam.tokens for beam in search(beam_width=2)]
    assert {len(beam.logprobs) for beam in searched.best()} == {0}


def test_the_context_ends_a_search() -> None:
    assert {len(beam.tokens) for beam in search(beam_width=2, ignore_eos=True, max_model_len=4)} == {4}


def test_a_failed_step_is_an_error() -> None:
    def failing(prompts, params):
        return [output(prompt, CompletionOutput(index=0, finish_reason="error"), "broken") for prompt in prompts]

    with pytest.raises(OctavoError, match="A step of the beam search failed: broken"):
        search(beam_width=2, generate=failing)
