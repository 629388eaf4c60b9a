"""Beam search for `LLM` and the server.

Each step generates one token for all beams, whose earlier KV is in the prefix cache.

Semantics are vLLM's: a step considers the 2 * `beam_width` most likely tokens of each beam, an end token completes a
beam, and the score of a beam is its log-probability divided by its length (prompt included) ** `length_penalty`.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from octavo_engine.frontend.outputs import PositionLogprobs, RequestOutput
from octavo_engine.frontend.request_builder import TokenizedPrompt
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from octavo_engine.wire.sampling import SamplingParams

S = TypeVar("S", bound=tuple[Any, ...])
Generate = Callable[[list[TokenizedPrompt], SamplingParams], list[RequestOutput]]


#: Largest absolute `length_penalty`: the length of a long beam to this power is still a number.
MAX_PENALTY = 10


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
        if not -MAX_PENALTY <= self.length_penalty <= MAX_PENALTY:
            rule = f"in [-{MAX_PENALTY}, {MAX_PENALTY}]"
            raise InvalidRequest(f"length_penalty must be {rule}, got {self.length_penalty!r}.", param="length_penalty")


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


class _Continuation(NamedTuple):
    """A beam and its next token, from which the new beam is made only if it is one of the best."""

    score: float
    beam: BeamSearchSequence
    token_id: int
    position: PositionLogprobs
    cum_logprob: float


class BeamSearch:
    """The search for one prompt, without an engine: generate one token for `prompts()` with `step_params`, pass the
    outputs to `advance`, and repeat until there are no prompts.

    It keeps at most `beam_width` open and as many completed beams. `keeps_logprobs`: beams have `logprobs`.
    """

    def __init__(
        self,
        prompt: TokenizedPrompt,
        params: BeamSearchParams,
        *,
        eos_token_id: int | None,
        max_model_len: int,
        keeps_logprobs: bool = True,
    ) -> None:
        self._params, self._eos_token_id, self._prompt = params, eos_token_id, prompt
        self._end_token_id = None if params.ignore_eos else eos_token_id
        self._max_len = min(len(prompt.token_ids) + params.max_tokens, max_model_len)
        self._keeps_logprobs = keeps_logprobs
        self._open = [BeamSearchSequence(tokens=list(prompt.token_ids), logprobs=[])]
        self._completed: list[BeamSearchSequence] = []

    @property
    def step_params(self) -> SamplingParams:
        width, temperature = self._params.beam_width, self._params.temperature
        return SamplingParams(logprobs=2 * width, max_tokens=1, temperature=temperature)

    @property
    def beams(self) -> list[BeamSearchSequence]:
        """All beams that are kept now."""
        return self._open + self._completed

    def prompts(self) -> list[TokenizedPrompt]:
        return [replace(self._prompt, text=None, token_ids=beam.tokens) for beam in self._open]

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Take one output for each prompt. Raises OctavoError if a step has failed."""
        found = [new for pair in zip(self._open, outputs, strict=True) for new in self._continuations(*pair)]
        ended = self._grown([new for new in found if new.token_id == self._end_token_id])
        for beam in ended:
            beam.finish_reason, beam.stop_reason = "stop", self._eos_token_id
        self._open = self._grown([new for new in found if new.token_id != self._end_token_id])
        if self._open and len(self._open[0].tokens) >= self._max_len:
            for beam in self._open:
                beam.finish_reason = "length"
            ended += self._open
            self._open = []
        kept = [(self._score(beam.tokens, beam.cum_logprob), beam) for beam in self._completed + ended]
        self._completed = [beam for _, beam in self._best(kept)]

    def best(self) -> list[BeamSearchSequence]:
        """The beams of an ended search, the best first; at most `beam_width`."""
        return self._completed

    def _continuations(self, beam: BeamSearchSequence, output: RequestOutput) -> Iterator[_Continuation]:
        """Yield a continuation for each reported next token. Raises OctavoError if the step has failed."""
        positions = output.outputs[0].logprobs
        if output.error is not None or not positions:
            raise OctavoError(f"A step of the beam search failed: {output.error or output.outputs[0].finish_reason}.")
        for token_id, entry in sorted(positions[0].items(), key=lambda item: item[1].rank or 0):
            cum_logprob = beam.cum_logprob + entry.logprob
            score = self._score((token_id,), cum_logprob, num_before=len(beam.tokens))
            yield _Continuation(score, beam, token_id, positions[0], cum_logprob)

    def _grown(self, continuations: list[_Continuation]) -> list[BeamSearchSequence]:
        """Return the beams of the best continuations."""
        return [
            BeamSearchSequence(
                [*new.beam.tokens, new.token_id],
                [*new.beam.logprobs, new.position] if self._keeps_logprobs else [],
                new.cum_logprob,
            )
            for new in self._best(continuations)
        ]

    def _best(self, scored: list[S]) -> list[S]:
        """Return the `beam_width` entries with the largest first items, the scores; of equal ones the first."""
        return heapq.nlargest(self._params.beam_width, scored, key=itemgetter(0))

    def _score(self, tokens: Sequence[int], cum_logprob: float, *, num_before: int = 0) -> float:
        length = num_before + len(tokens) - (tokens[-1] == self._eos_token_id)
        return cum_logprob / float(max(length, 1) ** self._params.length_penalty)


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
    searches = [BeamSearch(p, params, eos_token_id=eos_token_id, max_model_len=max_model_len) for p in prompts]
    while running := [(search, beams) for search in searches if (beams := search.prompts())]:
        step = running[0][0].step_params
        outputs = iter(generate([prompt for _, beams in running for prompt in beams], step))
        for search, beams in running:
            search.advance([next(outputs) for _ in beams])
    results = [BeamSearchOutput(search.best()) for search in searches]
    for beam in (beam for result in results for beam in result.sequences):
        beam.text = decode(beam.tokens)
    return results
