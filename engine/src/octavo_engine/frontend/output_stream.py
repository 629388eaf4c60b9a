"""Turns the engine core's token records into text: a `RequestAssembly` per request, a `SequenceAssembly` per output.

`OutputStream` is such a request of `AsyncLLM` in flight.

Stop strings are matched here, because the engine core has no text: a match ends the sequence for the caller, and `push`
returns True so that the caller aborts the sequence in the engine core. Records that still arrive for that sequence are
dropped. Text and tokens are kept until the request ends, log-probabilities until a delta has taken them, so that a slow
reader gets everything that it missed in one piece; memory is bounded by the length of the request.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from octavo_engine.frontend.outputs import (
    CompletionOutput,
    Logprob,
    OutputKind,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo_engine.text.detokenizer import IncrementalDetokenizer
from octavo_engine.text.stop_strings import StopSearch, StopStrings
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.records import EngineRequest, ErrorInfo, FinishReason, SeqOutput, Timing, TokenLogprobs

_LOGGER = logging.getLogger(__name__)


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """Map the token ids of one position to `Logprob`s: the chosen token, then the top k with ranks 1 to k.

    A chosen token among the top k has its rank there. Without a tokenizer, `decoded_token` is None.
    """
    ranks = entry.ranks or [entry.rank, *range(1, len(entry.token_ids))]
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_str(token_id))
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
    }


class SequenceAssembly:
    """The output of one sequence. Its state is open, then finished; `push` to a finished sequence does nothing."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer, stops: StopStrings) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[PositionLogprobs] | None = [] if params.wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if params.wants_logprobs else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.timing: Timing | None = None
        self.num_preemptions = 0
        self._params = params
        self._spelling = tokenizer if params.detokenize else None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_ids=params.shown_special_token_ids,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._stops = StopSearch(stops, include=params.include_stop_str_in_output)
        self._num_read_tokens = 0
        self._num_read_chars = 0
        self._reported_finish = False

    def push(self, out: SeqOutput) -> bool:
        """Add a token record; return True if a stop string ended the sequence, but the engine core still runs it."""
        if self.finish_reason is not None:
            return False
        self.num_preemptions = out.num_preemptions
        for i, token_id in enumerate(out.token_ids):
            is_stop_token = out.finish_reason == "stop" and i == len(out.token_ids) - 1
            self._add_token(token_id, out.logprobs[i] if out.logprobs else None)
            if self._params.detokenize and self._add_text(token_id, hidden=is_stop_token):
                self._finish("stop", self._stops.matched, out.timing)
                return out.finish_reason is None
        if out.finish_reason is not None:
            self._end_text()
            reason = "stop" if self._stops.matched else out.finish_reason
            self._finish(reason, self._stops.matched or out.stop_reason, out.timing)
        return False

    def has_unread(self) -> bool:
        """Return True if an output is due: the first, the last, or one after `stream_interval` new tokens."""
        if self.finish_reason is not None:
            return not self._reported_finish
        num_due = self._params.stream_interval or 1 if self._num_read_tokens else 1
        return len(self.token_ids) >= self._num_read_tokens + num_due

    def output(self, *, delta: bool) -> CompletionOutput:
        """Return the output so far, or only the part after the last delta, and then free its log-probabilities."""
        logprobs = self.logprobs
        if delta and logprobs is not None:
            self.logprobs = []
        tokens_from, text_from = (self._num_read_tokens, self._num_read_chars) if delta else (0, 0)
        self._num_read_tokens, self._num_read_chars = len(self.token_ids), len(self.text)
        self._reported_finish = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[text_from:],
            token_ids=self.token_ids[tokens_from:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs if delta or logprobs is None else [*logprobs],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            timing=self.timing,
            num_preemptions=self.num_preemptions,
        )

    def _add_token(self, token_id: int, entry: TokenLogprobs | None) -> None:
        self.token_ids.append(token_id)
        if entry is not None and self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(position_logprobs(entry, self._spelling))
            self.cumulative_logprob += entry.logprobs[0]

    def _add_text(self, token_id: int, *, hidden: bool) -> bool:
        """Append a token's text. Return True if it completes a stop string; before `min_tokens` tokens, none counts."""
        if hidden and not self._params.include_stop_str_in_output:
            return False
        text = self._detokenizer.push([token_id])
        if len(self.token_ids) <= self._params.min_tokens:
            self.text += text
            return False
        self.text += self._stops.push(text)
        return self._stops.matched is not None

    def _end_text(self) -> None:
        if self._params.detokenize:
            self.text += self._stops.push(self._detokenizer.flush())
            self.text += self._stops.flush()

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, timing: Timing | None) -> None:
        self.finish_reason, self.stop_reason, self.timing = reason, stop_reason, timing


@dataclass(slots=True)
class _PromptOutput:
    """Prompt log-probabilities and number of cached prompt tokens, which all sequences of a request share."""

    logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    from_index: int | None = None

    def push(self, out: SeqOutput, tokenizer: Tokenizer | None) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, out.num_cached_tokens)
        if out.prompt_logprobs is None or self.from_index not in (None, out.index):
            return
        self.from_index = out.index
        new = [None if entry is None else position_logprobs(entry, tokenizer) for entry in out.prompt_logprobs]
        self.logprobs = (self.logprobs or []) + new

    def take_logprobs(self, *, delta: bool) -> list[PositionLogprobs | None] | None:
        """Return the log-probabilities; a delta has them once."""
        taken = self.logprobs
        if delta:
            self.logprobs = None
        return taken


@dataclass(slots=True, kw_only=True)
class RequestAssembly:
    """The outputs of one request. `request_id` is the caller's id; the id in the engine core may differ."""

    request_id: str
    prompt: str | None
    request: EngineRequest
    tokenizer: Tokenizer
    sequences: list[SequenceAssembly] = field(init=False)
    metrics: RequestMetrics = field(init=False)
    error: ErrorInfo | None = None
    embedding: bytes | None = None
    _prompt_output: _PromptOutput = field(default_factory=_PromptOutput)
    _num_open: int = field(init=False)

    def __post_init__(self) -> None:
        params, stops = self.request.params, StopStrings(self.request.params.stop or ())
        self.sequences = [SequenceAssembly(i, self.request, self.tokenizer, stops) for i in range(params.n)]
        self.metrics = RequestMetrics(arrival_s=self.request.arrival_s)
        self._num_open = len(self.sequences)

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_cached_tokens(self) -> int:
        return self._prompt_output.num_cached_tokens

    def push(self, out: SeqOutput, now: float) -> bool:
        """Add a record; return True if the caller must abort this (request, index) in the engine core.

        An exception ends only this sequence, with an error: other requests' records follow.
        """
        sequence = self.sequences[out.index]
        was_open = sequence.finish_reason is None
        try:
            must_abort = self._add(sequence, out, now)
        except Exception as error:
            _LOGGER.exception("an output of request %s failed", self.request_id)
            self.error = self.error or ErrorInfo(f"The output failed: {type(error).__name__}: {error}")
            sequence.finish_reason, must_abort = "error", True
        if was_open and sequence.finish_reason is not None:
            self._num_open -= 1
        return must_abort

    def _add(self, sequence: SequenceAssembly, out: SeqOutput, now: float) -> bool:
        self._prompt_output.push(out, self.tokenizer if self.request.params.detokenize else None)
        if out.token_ids:
            self.metrics.first_token_s = self.metrics.first_token_s or now
            self.metrics.last_token_s = now
        self.error = self.error or out.error
        self.embedding = self.embedding or out.embedding
        return sequence.push(out)

    def take_output(self, kind: OutputKind) -> RequestOutput | None:
        """Return the output if a part of it is unread, else None; with "final" only once the request has ended."""
        if kind == "final" and not self.finished:
            return None
        unread = [s for s in self.sequences if s.has_unread()]
        if not unread:
            return None
        shown = unread if kind == "delta" else self.sequences
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[s.output(delta=kind == "delta") for s in shown],
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=self._prompt_output.take_logprobs(delta=kind == "delta"),
            num_cached_tokens=self._prompt_output.num_cached_tokens,
            error=None if self.error is None else self.error.message,
            error_kind=None if self.error is None else self.error.kind,
            embedding=self.embedding,
        )


class OutputStream:
    """One request in flight: its output so far, and a signal for its only reader that more output has arrived."""

    __slots__ = ("_has_output", "_loop", "_waiter", "assembly")

    def __init__(self, assembly: RequestAssembly) -> None:
        self.assembly = assembly
        self._loop = asyncio.get_running_loop()
        self._has_output = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def core_id(self) -> str:
        return self.assembly.request.request_id

    def notify(self) -> None:
        self._has_output = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_for_output(self) -> None:
        """Wait for the next output. This runs for every token, so it avoids the waiter list of asyncio.Event."""
        if not self._has_output:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._has_output = False
