"""`POST /v1/completions`: one or many prompts as text or token ids, with `echo` and log-probabilities in columns."""

import time
from functools import partial

from fastapi import APIRouter
from msgspec import structs
from octavo_engine.text.detokenizer import IncrementalDetokenizer
from octavo_engine.wire.sampling import SamplingParams
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answer_state import ChoiceState
from octavo_server.api.context import ApiContext, ResponseMeta, context_of
from octavo_server.api.generation import Generation, PromptInput
from octavo_server.api.load_header import with_load
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_generation
from octavo_server.api.writer import BaseResponseWriter
from octavo_server.http.responses import CancellableJSONResponse, SSEResponse
from octavo_server.openai.completion import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    Prompt,
)
from octavo_server.openai.logprobs import LogprobWriter, join, prompt_list, split

router = APIRouter()


@router.post(
    "/v1/completions", **accepts(CompletionRequest, "Continue one prompt or several", answer=Completion, streams=True)
)
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    meta, body, generation = await read_completion(request)
    writer = CompletionWriter(context, meta, body, generation)
    if body.stream:
        return SSEResponse(context.in_flight, meta.id, writer.frames(), writer.state.headers)
    headers = with_load(request, context.client, writer.state.headers)
    return CancellableJSONResponse(context.in_flight, meta.id, writer.body, headers)


async def read_completion(request: Request) -> tuple[ResponseMeta, CompletionRequest, Generation]:
    """Read, check and tokenise a request, without running it. Raises every error that does not come from the engine."""
    arrival_s = time.monotonic()
    context = context_of(request)
    async with held_body(request, partial(_parse, context)) as ((body, params, inputs), _):
        context.admission.check_size(len(inputs) * params.n)
        meta = context.new_response_meta("cmpl-", request, body)
        resolved = await context.resolve(params, priority=body.priority or 0)
        prompts = [await _prompt_input(context, body, prompt) for prompt in inputs]
    return meta, body, context.new_generation(meta, body, prompts, resolved, arrival_s)


def _parse(context: ApiContext, raw: bytes) -> tuple[CompletionRequest, SamplingParams, list[Prompt]]:
    body = parse_generation(context, CompletionRequest, raw)
    return body, _sampling_params(context, body), body.prompts()


def _sampling_params(context: ApiContext, body: CompletionRequest) -> SamplingParams:
    defaults = context.client.frontend.default_sampling_params
    params = body.sampling_params(defaults, max_tokens=body.output_limit, logprobs=body.logprobs)
    if body.echo and params.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = params.logprobs
    return params


async def _prompt_input(context: ApiContext, body: CompletionRequest, prompt: Prompt) -> PromptInput:
    text, may_exceed = (prompt if isinstance(prompt, str) else None), body.truncate_prompt_tokens is not None
    special = text is not None and body.add_special_tokens is not False
    if isinstance(prompt, str):
        prompt = await context.encode_prompt(prompt, add_special_tokens=special, may_exceed=may_exceed)
    if (images := context.client.frontend.images) is not None:
        images.find(prompt, (), "prompt")
    ids = context.truncate(prompt, body, is_framed=special)
    if body.echo and (text is None or len(ids) < len(prompt)):
        text = context.decode(ids)
    return PromptInput(token_ids=ids, text=text)


class CompletionWriter(BaseResponseWriter):
    def __init__(
        self, context: ApiContext, meta: ResponseMeta, request: CompletionRequest, generation: Generation
    ) -> None:
        super().__init__(context, meta, request, generation)
        self._num_logprobs = request.logprobs
        self._echoes = bool(request.echo)
        self._hides_output = request.is_echo_only
        self._returns_prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs = LogprobWriter(self.codec, num_top=request.logprobs or 0, as_ids=self.writes_token_ids)
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        self._held: dict[int, CompletionLogprobs] = {}  # columns of tokens that begin after the written text

    def full_response(self) -> Completion:
        meta = self.meta
        return Completion(
            id=meta.id,
            created=meta.created,
            model=meta.model,
            choices=[self._full_choice(choice) for choice in self.state.choices],
            usage=self.state.usage(),
            system_fingerprint=meta.fingerprint,
        )

    def chunks(self, choice: ChoiceState) -> list[CompletionChunk]:
        return [self.chunk_of([self._choice(choice)])]

    def chunk_of(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        meta = self.meta
        return CompletionChunk(id=meta.id, created=meta.created, model=meta.model, choices=choices)

    def _full_choice(self, choice: ChoiceState) -> CompletionChoice:
        prompt_logprobs = choice.prompt_logprobs if self._returns_prompt_logprobs else None
        return CompletionChoice(
            **structs.asdict(self._choice(choice)),
            prompt_logprobs=None if prompt_logprobs is None else prompt_list(prompt_logprobs),
        )

    def _choice(self, choice: ChoiceState) -> CompletionChunkChoice:
        prompt = self.generation.prompts[choice.prompt_idx]
        opens = not choice.has_opened
        text = "" if self._hides_output else choice.text
        echo = prompt.text or "" if opens and self._echoes else ""
        written = CompletionChunkChoice(
            choice.index,
            echo + text,
            self._choice_logprobs(choice, prompt) if self._num_logprobs is not None else None,
            choice.finish_reason,
            choice.stop_reason,
        )
        if self.returns_ids:
            written.token_ids = [] if self._hides_output else choice.token_ids
            written.prompt_token_ids = prompt.token_ids if opens else None
        return written

    def _choice_logprobs(self, choice: ChoiceState, prompt: PromptInput) -> CompletionLogprobs:
        """Return the log-probabilities of the tokens that begin in the written text; at its end, of all remaining
        tokens."""
        shift = len(prompt.text or "") if self._echoes else 0
        end = shift + choice.text_offset + len(choice.text)
        positions = [] if self._hides_output else choice.logprobs
        generated = self._logprobs.completion(positions, self._detokenizer(choice, prompt), shift)
        if choice.index in self._held:
            generated = join(self._held.pop(choice.index), generated)
        if choice.finish_reason is None:
            generated, self._held[choice.index] = split(generated, end)
        generated.text_offset = [min(offset, end) for offset in generated.text_offset]
        if choice.has_opened or not self._echoes or choice.prompt_logprobs is None:
            return generated
        given = self._logprobs.completion_prompt(prompt.token_ids, choice.prompt_logprobs, prompt.text or "")
        return join(given, generated)

    def _detokenizer(self, choice: ChoiceState, prompt: PromptInput) -> IncrementalDetokenizer:
        """Detokenizer of the choice's tokens whose log-probabilities have been written."""
        if choice.index not in self._detokenizers:
            skips = self.generation.params.skip_special_tokens
            self._detokenizers[choice.index] = IncrementalDetokenizer(
                self.codec, skip_special_tokens=skips, prompt_token_ids=prompt.token_ids
            )
        return self._detokenizers[choice.index]
