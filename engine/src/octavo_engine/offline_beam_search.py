"""Beam search for `LLM`: each step generates one token for all beams, whose earlier KV is in the prefix cache.

Semantics are vLLM's: a step considers the 2 * `beam_width` most likely tokens of each beam, an end token completes a
beam, and the score of a beam is its log-probability divided by its length (prompt included) ** `length_penalty`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo_engine.frontend import TokenizedPrompt
from octavo_engine.outputs import PositionLogprobs, RequestOutput
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from octavo_engine.wire.sampling import SamplingParams

Generate = Callable[[list[TokenizedPrompt], SamplingParams], list[RequestOutput]]


@dataclass(slots=True)
class BeamSearchParams:
    """The settings of a beam search. Raises InvalidRequest, which names the field."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {value!r}.", param=name)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` begin with the prompt, and so does `text`, which is set when the search ends."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, at most `beam_width`, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    cache_salt: str
    max_len: int
    open: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def prompts(self) -> list[TokenizedPrompt]:
        return [TokenizedPrompt(text=None, token_ids=b.tokens, cache_salt=self.cache_salt) for b in self.open]

    def advance(self, outputs: list[RequestOutput], params: BeamSearchParams, eos_token_id: int | None) -> None:
        candidates = []
        for beam, output in zip(self.open, outputs, strict=True):
            for new in _continuations(beam, output):
                if new.tokens[-1] == eos_token_id and not params.ignore_eos:
                    new.finish_reason, new.stop_reason = "stop", eos_token_id
                    self.completed.append(new)
                else:
                    candidates.append(new)
        best = _best(candidates, params, eos_token_id)
        if best and len(best[0].tokens) >= self.max_len:
            for beam in best:
                beam.finish_reason = "length"
            self.completed += best
            best = []
        self.open = best


def beam_search(
    prompts: list[TokenizedPrompt],
    params: BeamSearchParams,
    *,
    generate: Generate,
    decode: Callable[[list[int]], str],
    eos_token_id: int | None,
    max_model_len: int,
) -> list[BeamSearchOutput]:
    """Return the best beams of each prompt, in order. Raises InvalidRequest for a prompt that cannot run."""
    step = SamplingParams(logprobs=2 * params.beam_width, max_tokens=1, temperature=params.temperature)
    searches = [
        _Search(p.cache_salt, min(len(p.token_ids) + params.max_tokens, max_model_len), [_first_beam(p)])
        for p in prompts
    ]
    while running := [search for search in searches if search.open]:
        outputs = iter(generate([prompt for search in running for prompt in search.prompts()], step))
        for search in running:
            search.advance([next(outputs) for _ in search.open], params, eos_token_id)
    results = [BeamSearchOutput(_best(search.completed, params, eos_token_id)) for search in searches]
    for beam in (beam for result in results for beam in result.sequences):
        beam.text = decode(beam.tokens)
    return results


def _first_beam(prompt: TokenizedPrompt) -> BeamSearchSequence:
    return BeamSearchSequence(tokens=list(prompt.token_ids), logprobs=[])


def _continuations(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    """Return a beam for each reported next token. Raises OctavoError if the step has failed."""
    found = output.outputs[0].logprobs
    if output.error is not None or not found:
        raise OctavoError(f"A step of the beam search failed: {output.error or output.outputs[0].finish_reason}.")
    position = found[0]
    return [
        BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, position], beam.cum_logprob + entry.logprob)
        for token_id, entry in position.items()
    ]


def _best(
    beams: list[BeamSearchSequence], params: BeamSearchParams, eos_token_id: int | None
) -> list[BeamSearchSequence]:
    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] == eos_token_id)
        return beam.cum_logprob / float(max(length, 1) ** params.length_penalty)

    return sorted(beams, key=score, reverse=True)[: params.beam_width]
