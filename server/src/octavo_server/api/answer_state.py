"""State of each choice of an answer: engine output that has not been written to the response yet, and token counts.

A stream writes a choice whenever it has new text or has ended; a plain response writes it once, at the end. Tokens
whose text is held back (half a character, a possible stop string) are kept here, so that no empty chunk is sent.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from octavo_server.openai.answer import CompletionDetails, RequestTimes, Usage, count_usage, request_times

if TYPE_CHECKING:
    from octavo_engine.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
    from octavo_engine.wire.records import Timing

    from octavo_server.api.generation import GenerationDelta
    from octavo_server.output_parsing.events import OutputEvent
    from octavo_server.output_parsing.output_parser import OutputParser


CACHED_TOKENS = b"x-octavo-cached-tokens"
#: Memory in bytes that an answer takes for each token, and for each entry and each position of its log-probabilities.
TOKEN_BYTES = 40
VALUE_BYTES = 56  # of an embedding's value, as a float in a list and as text
LOGPROB_BYTES = 280  # measured: 200 as a Python object, 80 as text


@dataclass(slots=True)
class ChoiceState:
    index: int
    prompt_idx: int
    text: str = ""
    text_offset: int = 0
    num_tokens: int = 0
    has_opened: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: "list[PositionLogprobs]" = field(default_factory=list)
    prompt_logprobs: "list[PositionLogprobs | None] | None" = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: "Timing | None" = None  # set once the sequence has ended
    parser: "OutputParser | None" = None  # turns the text into `parts`; None: the answer is only text, kept in `text`
    parts: "list[OutputEvent]" = field(default_factory=list)

    def add(self, sequence: "CompletionOutput") -> None:
        self.num_tokens += len(sequence.token_ids)
        if self.parser is None:
            self.text += sequence.text
        else:
            self.parts += self.parser.push(sequence.text, sequence.token_ids)
        self.token_ids += sequence.token_ids
        if sequence.logprobs:
            self.logprobs += sequence.logprobs
        self.finish_reason, self.stop_reason = sequence.finish_reason, sequence.stop_reason
        self.timing = sequence.timing
        if self.parser is not None and sequence.finish_reason is not None:
            self.parts += self.parser.finish()
            self.finish_reason = self.parser.finish_reason(sequence.finish_reason)

    @property
    def has_unwritten_output(self) -> bool:
        return bool(self.text or self.parts) or self.finish_reason is not None

    def is_due(self, stream_interval: int) -> bool:
        """True if a stream should write now. `stream_interval`: tokens per chunk, except for the first and the last."""
        if self.finish_reason is not None or not self.has_opened:
            return self.has_unwritten_output
        return self.has_unwritten_output and len(self.token_ids) >= stream_interval

    @property
    def times(self) -> RequestTimes | UnsetType:
        return UNSET if self.timing is None else request_times(self.timing, self.num_tokens)

    def mark_written(self) -> None:
        self.has_opened = True
        self.text_offset += len(self.text)
        self.text, self.parts, self.token_ids, self.logprobs = "", [], [], []


class AnswerState:
    """All choices of an answer; choice index = prompt index * n + sequence index. `latest`: the last to get output."""

    def __init__(self, num_prompts: int, n: int, num_prompt_tokens: int) -> None:
        self.choices = [ChoiceState(index, index // n) for index in range(num_prompts * n)]
        self.latest = self.choices[0]
        self._n = n
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached: list[int | None] = [None] * num_prompts

    def add(self, delta: "GenerationDelta") -> list[ChoiceState]:
        """Add engine output; return the choices to which it belongs."""
        output, base = delta.output, delta.prompt_idx * self._n
        self._num_cached[delta.prompt_idx] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            for choice in self.choices[base : base + self._n]:
                choice.prompt_logprobs = output.prompt_logprobs
        advanced = []
        for sequence in output.outputs:
            choice = self.choices[base + sequence.index]
            choice.add(sequence)
            advanced.append(choice)
            self.latest = choice
        return advanced

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Header with the number of cached prompt tokens, for routers; empty list until every prompt has output."""
        if None in self._num_cached:
            return []
        return [(CACHED_TOKENS, str(self._sum_cached()).encode())]

    def usage(self) -> Usage:
        num_generated = sum(choice.num_tokens for choice in self.choices)
        usage = count_usage(self._num_prompt_tokens, num_generated, self._sum_cached())
        reasoning = [c.parser.num_reasoning_tokens for c in self.choices if c.parser is not None]
        counts = [count for count in reasoning if count is not None]
        if counts:
            usage.completion_tokens_details = CompletionDetails(sum(counts))
        return usage

    def _sum_cached(self) -> int:
        return sum(count for count in self._num_cached if count is not None)


def answer_bytes(output: "RequestOutput") -> int:
    """Estimate the bytes of memory that an output takes until the answer is complete."""
    positions = [*(output.prompt_logprobs or ())]
    num_bytes = VALUE_BYTES * len(output.embedding or b"") // 4
    for sequence in output.outputs:
        num_bytes += len(sequence.text.encode()) + TOKEN_BYTES * len(sequence.token_ids)
        positions += sequence.logprobs or ()
    return num_bytes + LOGPROB_BYTES * sum(1 + len(position or ()) for position in positions)
