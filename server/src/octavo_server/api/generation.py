"""All sequences of one HTTP request, each prompt times `n`, as one stream of deltas.

A handler that stops reading early (the client disconnected, a stream failed, the server drains) closes the iterator.
That closes the engine's iterator, which aborts the unfinished sequences. This is the only way to abort a request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.frontend.request_builder import ResolvedParams, TokenizedPrompt
from octavo_engine.frontend.request_limits import fit_to_context
from octavo_engine.wire.errors import InvalidRequest, OctavoError, Overloaded, Unavailable
from octavo_engine.wire.records import ImageInput
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import WAKE_RETRY_S

from octavo_server.api.admission import Admission, AdmittedPrompt
from octavo_server.api.answer_state import LOGPROB_BYTES, answer_bytes
from octavo_server.api.beam_search import BeamRun
from octavo_server.http.body import BodyBudget, BodyReservation
from octavo_server.openai.errors import GenerationFailed
from octavo_server.openai.limits import check_logprobs

if TYPE_CHECKING:
    from octavo_engine.frontend.outputs import RequestOutput

    from octavo_server.request_metrics import RequestMetrics, RequestUsage


#: Prompts of one request that start in one turn of the event loop, so that other requests are served in between.
STARTED_AT_ONCE = 32


@dataclass(slots=True, kw_only=True)
class PromptInput:
    """`resolved`: parameters of this prompt, where they differ from those of the generation."""

    token_ids: list[int]
    text: str | None = None
    resolved: ResolvedParams | None = None
    images: tuple[ImageInput, ...] = ()


class NumLogprobs(NamedTuple):
    """Most log-probabilities in one prompt's outputs: of generated tokens, and of the prompt's tokens."""

    generated: int
    given: int


@dataclass(slots=True)
class GenerationDelta:
    prompt_idx: int
    output: "RequestOutput"


@dataclass(slots=True, kw_only=True)
class Generation:
    client: AsyncLLM
    request_id: str
    prompts: list[PromptInput]
    resolved: ResolvedParams
    priority: int
    cache_salt: str
    usage: "RequestUsage"
    admission: Admission
    budget: BodyBudget
    track: "Callable[[PromptInput, SamplingParams], RequestMetrics]"
    adapter: str = ""  # its name
    max_output_tokens: int | None = None
    length_penalty: float | None = None  # of a beam search, else None
    log_output: "Callable[[int, RequestOutput], None] | None" = None  # called with the prompt's index
    num_ended: int = field(default=0, init=False)  # prompts whose last output has come

    @property
    def tenant(self) -> str:
        return self.usage.tenant

    @property
    def params(self) -> SamplingParams:
        return self.resolved.params

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def fitted(self) -> list[SamplingParams]:
        """Sampling parameters that the engine would use for each prompt. Raises InvalidRequest as `deltas` does."""
        return [self.client.frontend.fit(prompt.token_ids, self._fitted(prompt)) for prompt in self.prompts]

    def deltas(self) -> AsyncGenerator[GenerationDelta, None]:
        """Run the request. Raises the engine's errors, InvalidRequest for too many log-probabilities, GenerationFailed
        for a sequence that ended with an error, Overloaded if the queue is full, and Unavailable for a prompt that
        waited too long in the queue.
        """
        if self.params.wants_logprobs or self.params.prompt_logprobs is not None:
            check_logprobs(sum(sum(self._num_logprobs(prompt)) for prompt in self.prompts))
        self.admission.check(self.tenant, num_seqs=len(self.prompts) * self.params.n)
        for prompt in self.prompts:
            self._fitted(prompt)
        self.usage.begin(self.num_prompt_tokens)
        return self._prompt_deltas(0) if len(self.prompts) == 1 else self._merged()

    def reserve_answer(self) -> BodyReservation:
        return self.budget.reserve(self.tenant, is_answer=True)

    async def add_all(self, add: Callable[[GenerationDelta], object], reservation: BodyReservation) -> None:
        """Run the request for an answer that is kept until it is whole: reserve the memory of each delta, then add it.

        Raises the errors of `deltas` and of `BodyReservation.add`.
        """
        if self.params.prompt_logprobs is not None:
            given = sum(self._num_logprobs(prompt).given for prompt in self.prompts)
            self.budget.check_answer(LOGPROB_BYTES * given, param="prompt_logprobs")
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                reservation.add(answer_bytes(delta.output))
                add(delta)

    def _hold_images(self, index: int) -> AbstractContextManager[object]:
        """Reserve memory for the bytes of a prompt's images, which the engine keeps until the prompt ends."""
        images = self.prompts[index].images
        if not images:
            return nullcontext()
        reservation = self.budget.reserve(self.tenant)
        reservation.add(sum(len(image.data) for image in images))
        return reservation

    def _admit(self, index: int) -> AdmittedPrompt:
        num_tokens = len(self.prompts[index].token_ids)
        return self.admission.admit(self.tenant, num_seqs=self.params.n, num_tokens=num_tokens)

    async def _prompt_deltas(
        self, index: int, admitted: AdmittedPrompt | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        resolved = self._fitted(self.prompts[index])
        track = self.track(self.prompts[index], resolved.params)
        engine_id = f"{self.request_id}-{index}"
        try:
            with admitted or self._admit(index) as admitted, self._hold_images(index):
                for _ in range(index // STARTED_AT_ONCE):
                    await asyncio.sleep(0)
                async with aclosing(self._outputs(index, engine_id, resolved)) as outputs:
                    async for output in outputs:
                        if not admitted.has_started:
                            self._start(admitted, output)
                        track.output(output, time.monotonic())
                        if self.log_output is not None:
                            self.log_output(index, output)
                        _raise_if_failed(output)
                        if output.finished:
                            self._end_prompt(admitted)
                        yield GenerationDelta(index, output)
        except (InvalidRequest, Overloaded):
            track.refuse()
            raise
        except OctavoError:
            track.close("error")
            raise
        finally:
            track.close("abort")

    def _start(self, admitted: AdmittedPrompt, output: "RequestOutput") -> None:
        """Mark the prompt as started. Raises Unavailable if its first output shows that the engine dropped it, as it
        waited too long."""
        limits = self.admission.limits
        if limits.max_queue_time is not None and _is_dropped(output):
            raise Unavailable(
                f"The request waited in the queue longer than the limit of {limits.max_queue_time:g} s "
                f"(--max-queue-time): send it again later.",
                retry_after_s=self.admission.retry_after_s(),
            )
        admitted.start()

    def _end_prompt(self, admitted: AdmittedPrompt) -> None:
        """Free the places of a prompt before its last output is sent: the client may then send its next request."""
        admitted.leave()
        self.num_ended += 1
        if self.num_ended == len(self.prompts):
            self.usage.end("")

    def _fitted(self, prompt: PromptInput) -> ResolvedParams:
        """The parameters with `max_tokens` cut to the context. Raises ContextLengthExceeded if the prompt fills it."""
        resolved = prompt.resolved or self.resolved
        if resolved.pooling is not None:
            return resolved
        params = fit_to_context(
            resolved.params,
            len(prompt.token_ids),
            self.client.frontend.max_model_len,
            clamp=True,
            max_output_tokens=self.max_output_tokens,
        )
        return replace(resolved, params=params)

    def _num_logprobs(self, prompt: PromptInput) -> NumLogprobs:
        params, vocab_size = self._fitted(prompt).params, self.client.frontend.tokenizer.vocab_size
        named = params.logprob_token_ids
        generated, given = (
            0 if asked is None else vocab_size if asked == -1 else max(asked, 1)
            for asked in (len(named) if named else params.logprobs, params.prompt_logprobs)
        )
        return NumLogprobs(generated * params.n * (params.max_tokens or 0), given * len(prompt.token_ids))

    def _outputs(self, index: int, engine_id: str, resolved: ResolvedParams) -> "AsyncGenerator[RequestOutput, None]":
        prompt = self.prompts[index]
        given = TokenizedPrompt(
            text=prompt.text, token_ids=prompt.token_ids, cache_salt=self.cache_salt, images=prompt.images
        )
        if self.length_penalty is not None:
            return BeamRun(
                client=self.client,
                engine_id=engine_id,
                prompt=given,
                params=resolved.params,
                length_penalty=self.length_penalty,
                priority=self.priority,
                tenant=self.tenant,
                weight=self.usage.limits.weight,
                adapter=self.adapter,
                reserve=self.reserve_answer,
            ).outputs()
        limit_s = self.admission.limits.max_queue_time
        return self.client.generate(
            given,
            resolved,
            engine_id,
            kind="delta",
            priority=self.priority,
            tenant=self.tenant,
            weight=self.usage.limits.weight,
            start_by_s=None if limit_s is None else time.monotonic() + limit_s,
            adapter=self.adapter,
        )

    async def _merged(self) -> AsyncGenerator[GenerationDelta, None]:
        queue: asyncio.Queue[GenerationDelta | asyncio.Task[None]] = asyncio.Queue()
        # All prompts are admitted at once: no other request may take the places that `deltas` has found free.
        admitted = [self._admit(index) for index in range(len(self.prompts))]
        readers = {asyncio.create_task(self._feed(index, queue, entry)) for index, entry in enumerate(admitted)}
        num_open = len(readers)
        try:
            for reader in readers:
                reader.add_done_callback(queue.put_nowait)
            while num_open:
                item = await queue.get()
                if isinstance(item, GenerationDelta):
                    yield item
                else:
                    num_open -= 1
                    item.result()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for entry in admitted:  # left by a reader that was cancelled before it began
                entry.leave()

    async def _feed(
        self, index: int, queue: "asyncio.Queue[GenerationDelta | asyncio.Task[None]]", admitted: AdmittedPrompt
    ) -> None:
        async with aclosing(self._prompt_deltas(index, admitted)) as source:
            async for delta in source:
                queue.put_nowait(delta)


def _is_dropped(output: "RequestOutput") -> bool:
    return bool(output.outputs) and all(sequence.finish_reason == "abort" for sequence in output.outputs)


def _raise_if_failed(output: "RequestOutput") -> None:
    for sequence in output.outputs:
        if sequence.finish_reason == "error":
            if output.error is not None and output.error_kind == "invalid_request":
                raise InvalidRequest(output.error)
            if output.error is not None and output.error_kind == "unavailable":
                raise Unavailable(output.error, retry_after_s=WAKE_RETRY_S)
            raise GenerationFailed(output.error or "The engine could not finish this request: send it again.")
