"""What every handler works with: the engine, the settings, the metrics and the responses in flight.

One per application, kept in `app.state`: two applications in one process share nothing.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from octavo_engine.log_format import REQUEST_ID
from octavo_engine.wire.errors import InvalidRequest, ModelNotFound
from octavo_engine.wire.hashing import tenant_salt
from pydantic import BaseModel
from starlette.requests import Request

from octavo_server.api.admission import Admission
from octavo_server.api.client import EngineClient
from octavo_server.api.generation import Generation, PromptInput
from octavo_server.config import ServerConfig
from octavo_server.http.body import BodyBudget, ClientDisconnected
from octavo_server.http.body import read_body as read_raw
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.request_threads import RequestThreads
from octavo_server.kv.publisher import KVPublisher
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.limits import check_chars, check_fits
from octavo_server.openai.request_parser import parse_request
from octavo_server.openai.unsupported import refuse_unsupported
from octavo_server.watchdog import EngineSnapshot, StallDetector

if TYPE_CHECKING:
    from octavo_engine.wire.sampling import SamplingParams

    from octavo_server.request_metrics import RequestMetrics
    from octavo_server.telemetry import Telemetry

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Generating = TypeVar("Generating", bound=GenerationFields)
Parsed = TypeVar("Parsed")

MAX_LOGGED_FIELDS = 20


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    id: str
    created: int
    model: str
    fingerprint: str
    tenant: str = ""


@dataclass(slots=True, kw_only=True)
class ApiContext:
    client: EngineClient
    config: ServerConfig
    telemetry: "Telemetry"
    fingerprint: str
    stall: StallDetector
    kv: KVPublisher
    model_card: bytes
    in_flight: InFlight = field(default_factory=InFlight)
    threads: RequestThreads = field(default_factory=RequestThreads)
    lifecycle: Lifecycle = field(init=False)
    body_budget: BodyBudget = field(init=False)
    admission: Admission = field(init=False)
    longest_token: int = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        codec = self.client.tokenizer
        self.lifecycle = Lifecycle(self.in_flight, timeout_s=self.config.drain_timeout_s)
        self.lifecycle.on_change = self.tell_routers
        self.body_budget = BodyBudget(self.config.max_body_memory_bytes)
        self.admission = Admission(
            self.config.queue,
            max_running=self.client.config.max_num_seqs,
            clock=time.monotonic,
            on_refusal=self.telemetry.count_rejection,
        )
        self.longest_token = max((len(codec.token_bytes(t)) for t in range(codec.vocab_size)), default=1)

    def look_at_engine(self) -> None:
        client = self.client
        snapshot = EngineSnapshot(num_unfinished=client.num_unfinished, stats=client.stats, cpu_s=client.core_cpu_s())
        self.stall.observe(snapshot, time.monotonic())
        self.tell_routers()

    def tell_routers(self) -> None:
        self.kv.set_accepts(self.lifecycle.state == "accepting" and self.unhealthy_reason is None)

    @property
    def unhealthy_reason(self) -> str | None:
        if self.client.is_dead:
            return str(self.client.dead_error or "the engine core is dead.")
        return self.stall.stall_reason(time.monotonic())

    def check_queue(self, request: Request) -> None:
        """Raises Overloaded before the body is read, where no more requests are taken."""
        self.admission.check(request.scope["state"].get("tenant", ""))

    def model_name(self, asked: str | None) -> str:
        """Raises ModelNotFound. Left out (or empty), the first served name is meant."""
        if not asked:
            return self.config.model_name
        if asked not in self.config.served_model_names:
            raise ModelNotFound(asked)
        return asked

    def head(self, prefix: str, request: Request, body: GenerationFields) -> Head:
        state = request.scope["state"]
        request_id = body.request_id or state["request_id"]
        REQUEST_ID.set(request_id)
        name, tenant = self.model_name(body.model), state.get("tenant", "")
        return Head(f"{prefix}{request_id}", int(time.time()), name, self.fingerprint, tenant)

    def generation(
        self, head: Head, body: GenerationFields, prompts: list[PromptInput], params: "SamplingParams", arrival_s: float
    ) -> Generation:
        """Nothing runs, and nothing is counted, before it is read."""

        def track(prompt: PromptInput) -> "RequestMetrics":
            num_tokens = len(prompt.token_ids)
            return self.telemetry.track_request(
                head.id, arrival_s=arrival_s, num_prompt_tokens=num_tokens, params=params
            )

        self._log_request(head, prompts, params)
        return Generation(
            client=self.client,
            request_id=head.id,
            prompts=prompts,
            params=params,
            priority=body.priority or 0,
            cache_salt=tenant_salt(head.tenant if self.config.cache_isolation else "", body.cache_salt or ""),
            tenant=head.tenant,
            admission=self.admission,
            track=track,
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """In a thread: the streams of others go on. Raises InvalidRequest for a text that is too long to tokenise."""
        return await self.threads.run(partial(self._tokenize, text, add_special_tokens), num_bytes=len(text))

    async def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ContextLengthExceeded: at once for a text that is far too long."""
        tokenize = partial(self.tokenize_prompt, text, add_special_tokens=add_special_tokens)
        return await self.threads.run(tokenize, num_bytes=len(text))

    def tokenize_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode_prompt`, for who is in a thread already."""
        check_fits(text, max_model_len=self.client.max_model_len, longest_token=self.longest_token)
        return self._tokenize(text, add_special_tokens)

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        check_chars(text, self.config.limits)
        return self.client.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, param: str = "prompt") -> str:
        """Raises InvalidRequest for an id outside the vocabulary."""
        vocab_size = self.client.tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size}).", param=param)
        return self.client.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _log_request(self, head: Head, prompts: list[PromptInput], params: "SamplingParams") -> None:
        if self.config.enable_log_requests:
            shown = [(p.text or str(p.token_ids))[: self.config.max_log_len] for p in prompts]
            logger.info("request %s: prompts %r, %s", head.id, shown, params)


def context_of(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


async def read_body(request: Request, parse: Callable[[bytes], Parsed]) -> tuple[Parsed, int]:
    """What `parse` makes of the body, and the size of the body. Nothing keeps the body itself.

    Raises what `parse` and `RequestLimits` forbid, and Unavailable where too many bodies are read at once.
    """
    context = context_of(request)
    with context.body_budget.reserve() as reservation:
        try:
            raw = await read_raw(request.scope, request.receive, context.config.limits, reservation)
        except ClientDisconnected:
            request_id = request.scope["state"]["request_id"]
            logger.debug("request %s: the client left before the body was complete", request_id)
            raise
        return await context.threads.parse(parse, raw), len(raw)


def parse_body(context: ApiContext, kind: type[Body], raw: bytes) -> Body:
    """Raises MalformedRequest and InvalidRequest."""
    body = parse_request(raw, kind, context.config.limits)
    if body.model_extra and logger.isEnabledFor(logging.DEBUG):
        logger.debug("fields that the API doesn't define: %s", list(islice(body.model_extra, MAX_LOGGED_FIELDS)))
    return body


def parse_generation(context: ApiContext, kind: type[Generating], raw: bytes) -> Generating:
    """`parse_body`, and every refusal that needs no tokenizer."""
    body = parse_body(context, kind, raw)
    context.model_name(body.model)
    refuse_unsupported(body)
    body.check()
    return body
