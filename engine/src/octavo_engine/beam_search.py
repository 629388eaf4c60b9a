"""Beam search for `LLM` and the server.

Each step generates one token for all beams, whose earlier KV is in the prefix cache.

Semantics are vLLM's: a step considers the 2 * `beam_width` most likely tokens of each beam, an end token completes a
beam, and the score of a beam is its log-probability divided by its length (prompt included) ** `length_penalty`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo_engine.frontend import TokenizedPrompt
from octavo_engine.outputs import PositionLogprobs, RequestOutput
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from octavo_engine.wire.sampling import SamplingParams

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


class BeamSearch:
    """The search for one prompt, without an engine: generate one token for `prompts()` with `step_params`, pass the
    outputs to `advance`, and repeat until there are no prompts."""

    def __init__(
        self, prompt: TokenizedPrompt, params: BeamSearchParams, *, eos_token_id: int | None, max_model_len: int
    ) -> None:
        self._params, self._eos_token_id, self._prompt = params, eos_token_id, prompt
        self._max_len = min(len(prompt.token_ids) + params.max_tokens, max_model_len)
        self._open = [BeamSearchSequence(tokens=list(prompt.token_ids), logprobs=[])]
        self._completed: list[BeamSearchSequence] = []

    @property
    def step_params(self) -> SamplingParams:
        width, temperature = self._params.beam_width, self._params.temperature
        return SamplingParams(logprobs=2 * width, max_tokens=1, temperature=temperature)

    def prompts(self) -> list[TokenizedPrompt]:
        return [replace(self._prompt, text=None, token_ids=beam.tokens) for beam in self._open]

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Take one output for each prompt. Raises OctavoError if a step has failed."""
        candidates = []
        for beam, output in zip(self._open, outputs, strict=True):
            for new in _continuations(beam, output):
                if new.tokens[-1] == self._eos_token_id and not self._params.ignore_eos:
                    new.finish_reason, new.stop_reason = "stop", self._eos_token_id
                    self._completed.append(new)
                else:
                    candidates.append(new)
        best = self._best(candidates)
        if best and len(best[0].tokens) >= self._max_len:
            for beam in best:
                beam.finish_reason = "length"
            self._completed += best
            best = []
        self._open = best

    def best(self) -> list[BeamSearchSequence]:
        """The beams of an ended search, the best first; at most `beam_width`."""
        return self._best(self._completed)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(beam: BeamSearchSequence) -> float:
            length = len(beam.tokens) - (beam.tokens[-1] == self._eos_token_id)
            return beam.cum_logprob / float(max(length, 1) ** self._params.length_penalty)

        return sorted(beams, key=score, reverse=True)[: self._params.beam_width]


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


def _continuations(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    """Return a beam for each reported next token. Raises OctavoError if the step has failed."""
    positions = output.outputs[0].logprobs
    if output.error is not None or not positions:
        raise OctavoError(f"A step of the beam search failed: {output.error or output.outputs[0].finish_reason}.")
    position = positions[0]
    return [
        BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, position], beam.cum_logprob + entry.logprob)
        for token_id, entry in position.items()
    ]
