"""Beam search for one prompt of an HTTP request, in the form of the engine's outputs."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.frontend.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from octavo_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo_engine.frontend.request_builder import TokenizedPrompt
from octavo_engine.wire.sampling import SamplingParams

from octavo_server.api.answer_state import LOGPROB_BYTES
from octavo_server.http.body import BodyReservation

#: Bytes of memory for each token of a beam and its prompt: a reference, because beams share the integers.
BEAM_TOKEN_BYTES = 16


@dataclass(slots=True, kw_only=True)
class BeamRun:
    """`params`: those of the request; `n` is the number of beams, and `max_tokens` fits the context. `adapter`: a name,
    or empty. `reserve`: makes a reservation for the memory of the beams."""

    client: AsyncLLM
    engine_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    length_penalty: float
    priority: int
    tenant: str
    weight: float
    adapter: str
    reserve: Callable[[], BodyReservation]

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield an output without sequences after the first step, then all beams. Raises the engine's errors,
        Unavailable beyond the memory budget, and Overloaded beyond the tenant's share."""
        search = BeamSearch(
            self.prompt,
            BeamSearchParams(
                beam_width=self.params.n,
                max_tokens=self.params.max_tokens or 1,
                ignore_eos=self.params.ignore_eos,
                temperature=self.params.temperature,
                length_penalty=self.length_penalty,
            ),
            eos_token_id=self.client.frontend.tokenizer.eos_token_id,
            max_model_len=self.client.frontend.max_model_len,
            keeps_logprobs=self.params.logprobs is not None,
        )
        arrival_s, num_cached, has_started = time.monotonic(), 0, False
        with self.reserve() as reservation:
            while prompts := search.prompts():
                steps = await self._step(prompts, search.step_params, arrival_s)
                if not has_started:
                    has_started, num_cached = True, steps[0].num_cached_tokens
                    yield self._output([], arrival_s, num_cached, finished=False)
                search.advance(steps)
                reservation.add(max(0, self._num_bytes(search.beams) - reservation.num_bytes))
        beams = [self._completion(i, beam) for i, beam in enumerate(search.best())]
        yield self._output(beams, arrival_s, num_cached, finished=True)

    def _num_bytes(self, beams: list[BeamSearchSequence]) -> int:
        """Estimate the memory of the beams; each position has the log-probabilities of 2 n tokens."""
        num_tokens = sum(len(beam.tokens) for beam in beams)
        num_logprobs = 2 * self.params.n * sum(len(beam.logprobs) for beam in beams)
        return BEAM_TOKEN_BYTES * num_tokens + LOGPROB_BYTES * num_logprobs

    async def _step(
        self, prompts: list[TokenizedPrompt], params: SamplingParams, arrival_s: float
    ) -> list[RequestOutput]:
        """Generate one token for each prompt. A failure or a cancellation aborts the others.

        Each step has the search's own `arrival_s`, so that it does not wait behind later requests.
        """
        tasks = [asyncio.create_task(self._last_output(prompt, params, arrival_s)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _last_output(self, prompt: TokenizedPrompt, params: SamplingParams, arrival_s: float) -> RequestOutput:
        source = self.client.generate(
            *(prompt, params, self.engine_id),
            kind="final",
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            arrival_s=arrival_s,
            adapter=self.adapter,
        )
        async with aclosing(source) as outputs:
            return await anext(outputs)

    def _completion(self, index: int, beam: BeamSearchSequence) -> CompletionOutput:
        start = len(self.prompt.token_ids)
        ids = beam.tokens[start:]
        hides_end = beam.finish_reason == "stop" and not self.params.include_stop_str_in_output
        text = self.client.frontend.tokenizer.decode(
            ids[:-1] if hides_end else ids, skip_special_tokens=self.params.skip_special_tokens
        )
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [{i: tokens[i], **tokens} for i, tokens in zip(ids, beam.logprobs, strict=True)]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=beam.cum_logprob,
            logprobs=logprobs,
            finish_reason="stop" if beam.finish_reason == "stop" else "length",
        )

    def _output(
        self, outputs: list[CompletionOutput], arrival_s: float, num_cached: int, *, finished: bool
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.engine_id,
            prompt=None,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            finished=finished,
            metrics=RequestMetrics(arrival_s=arrival_s),
            num_cached_tokens=num_cached,
        )
