"""`ApiContext`: the objects that every handler uses: engine client, settings, metrics, responses in flight.

Each application has its own context in `app.state`: two applications in one process share no state.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.frontend.request_limits import max_output_tokens
from octavo_engine.log_format import REQUEST_ID
from octavo_engine.settings.config import most_seqs
from octavo_engine.wire.errors import InvalidRequest, ModelNotFound
from octavo_engine.wire.hashing import tenant_salt
from starlette.requests import Request

from octavo_server.access_log import OutputLog, UsageLog
from octavo_server.api.admission import Admission
from octavo_server.api.generation import Generation, PromptInput
from octavo_server.api.sleep_control import SleepControl
from octavo_server.config import TEXT_BYTES, ServerConfig
from octavo_server.http.body import BodyBudget
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.rate_limits import RateLimits
from octavo_server.http.request_id import is_usable
from octavo_server.http.request_threads import RequestThreads
from octavo_server.http.tenants_file import TenantLimits, TenantsFile
from octavo_server.kv.publisher import KVPublisher
from octavo_server.openai.embedding import VectorFields
from octavo_server.openai.fields import EngineFields, GenerationFields
from octavo_server.openai.limits import check_chars, check_fits
from octavo_server.openai.rendering import NO_DEFAULTS, RenderDefaults
from octavo_server.request_metrics import RequestUsage
from octavo_server.watchdog import EngineSnapshot, StallDetector

if TYPE_CHECKING:
    from octavo_engine.frontend.adapter_names import NamedAdapter
    from octavo_engine.frontend.request_builder import ResolvedParams
    from octavo_engine.wire.sampling import SamplingParams

    from octavo_server.request_metrics import RequestMetrics
    from octavo_server.telemetry import Telemetry

logger = logging.getLogger(__name__)

THIS_SERVER = "this server"


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """Fields that all chunks of one response share, and the request's `usage`. `adapter`: name of the adapter if the
    request's `model` names one."""

    id: str
    created: int
    model: str
    fingerprint: str
    usage: RequestUsage
    adapter: str = ""


@dataclass(slots=True, kw_only=True)
class ApiContext:
    client: AsyncLLM
    config: ServerConfig
    telemetry: "Telemetry"
    fingerprint: str
    stall: StallDetector
    kv: KVPublisher
    model_card: bytes
    render_defaults: RenderDefaults = NO_DEFAULTS
    usage_log: UsageLog | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    threads: RequestThreads = field(default_factory=RequestThreads)
    lifecycle: Lifecycle = field(init=False)
    sleep_control: SleepControl = field(init=False)
    body_budget: BodyBudget = field(init=False)
    admission: Admission = field(init=False)
    tenants: TenantsFile = field(init=False)
    longest_token: int = field(init=False)
    max_output_tokens: int | None = field(init=False)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        codec, limits = self.client.frontend.tokenizer, self.config.limits
        if limits.max_request_bytes is None and self.client.frontend.images is None:
            self.config = replace(self.config, limits=replace(limits, max_request_bytes=TEXT_BYTES))
        self.lifecycle = Lifecycle(self.in_flight, timeout_s=self.config.drain_timeout)
        self.lifecycle.on_change = self.publish_readiness
        self.sleep_control = SleepControl(self.client, self.lifecycle)
        self.body_budget = BodyBudget(self.config.max_body_memory)
        self.tenants = TenantsFile(self.config.tenants_file)
        self.admission = Admission(
            self.config.queue,
            max_running=most_seqs(self.client.config),
            clock=time.monotonic,
            on_refusal=self.telemetry.count_rejection,
        )
        self.max_output_tokens = max_output_tokens(self.client.config, self.client.frontend.default_sampling_params)
        self.longest_token = max((len(codec.token_bytes(t)) for t in range(codec.vocab_size)), default=1)

    def update_health(self) -> None:
        client = self.client
        snapshot = EngineSnapshot(
            num_unfinished=client.num_unfinished,
            stats=client.stats,
            cpu_s=client.core_cpu_s(),
            num_answers=client.probe_core(),
        )
        self.stall.observe(snapshot, time.monotonic())
        self.publish_readiness()

    def publish_readiness(self) -> None:
        self.kv.set_accepts(self.lifecycle.state == "accepting" and self.unhealthy_reason is None)

    @property
    def unhealthy_reason(self) -> str | None:
        if self.client.is_dead:
            return str(self.client.dead_error or "the engine core is dead.")
        return self.stall.stall_reason(time.monotonic())

    def check_queue(self, request: Request) -> None:
        """Reject a request before its body is read: raises Overloaded if the queue is full, and RateLimited."""
        tenant = request.scope["state"].get("tenant", "")
        self.admission.check(tenant)
        self._report_tenants()
        self.rate_limits.check(tenant, self._limits_of(request))

    def resolve_model_name(self, asked: str | None) -> str:
        """Check the `model` of a body, which may be missing; return the name of its adapter, or the first served name.

        Raises ModelNotFound.
        """
        if asked and asked in self.adapters:
            return asked
        if asked and asked not in self.config.served_model_names:
            raise ModelNotFound(asked)
        return self.config.model_name

    @property
    def adapters(self) -> "Mapping[str, NamedAdapter]":
        """The loaded adapters, by name."""
        return self.client.adapters

    def new_response_meta(self, prefix: str, request: Request, body: EngineFields) -> ResponseMeta:
        state = request.scope["state"]
        request_id = body.request_id if body.request_id and is_usable(body.request_id) else state["request_id"]
        REQUEST_ID.set(request_id)
        name, tenant = self.resolve_model_name(body.model), state.get("tenant", "")
        usage = state["usage"] = RequestUsage(
            request_id=state["request_id"],
            tenant=tenant,
            limits=self._limits_of(request),
            model=name,
            path=request.scope["path"],
            arrival_s=time.monotonic(),
            sink=self,
        )
        adapter = name if name in self.adapters else ""
        return ResponseMeta(f"{prefix}{request_id}", int(time.time()), name, self.fingerprint, usage, adapter)

    def new_generation(
        self,
        meta: ResponseMeta,
        body: EngineFields,
        prompts: list[PromptInput],
        resolved: "ResolvedParams",
        arrival_s: float,
    ) -> Generation:
        """Return the generation of a parsed request. It starts, and counts in metrics, when its deltas are read."""

        def track(prompt: PromptInput, params: "SamplingParams") -> "RequestMetrics":
            num_tokens = len(prompt.token_ids)
            return self.telemetry.track_request(meta.id, usage, num_prompt_tokens=num_tokens, params=params)

        usage = meta.usage
        usage.arrival_s = arrival_s
        self._log_request(meta, prompts, resolved.params)
        return Generation(
            client=self.client,
            request_id=meta.id,
            prompts=prompts,
            resolved=resolved,
            priority=body.priority or 0,
            cache_salt=tenant_salt(usage.tenant if self.config.cache_isolation else "", body.cache_salt or ""),
            adapter=meta.adapter,
            usage=usage,
            admission=self.admission,
            budget=self.body_budget,
            track=track,
            max_output_tokens=min(
                (limit for limit in (self.max_output_tokens, usage.limits.max_tokens) if limit is not None),
                default=None,
            ),
            length_penalty=_length_penalty(body),
            log_output=OutputLog(meta.id, self.config.max_log_len).add if self.config.enable_log_outputs else None,
        )

    def begin_request(self, usage: RequestUsage) -> None:
        self._report_tenants()
        usage.admitted = self.rate_limits.admit(usage.tenant, usage.limits, usage.num_prompt_tokens)
        usage.admitted.record_sent(THIS_SERVER)
        self.kv.add_request(usage.tenant, usage.num_prompt_tokens)

    def end_request(self, usage: RequestUsage) -> None:
        assert usage.admitted is not None
        usage.admitted.end()
        self.kv.end_request(usage.tenant)
        self.telemetry.tenants.add_request(usage.tenant, usage.finish)
        if self.usage_log is not None:
            self.usage_log.write(usage)

    async def resolve(self, params: "SamplingParams", *, priority: int) -> "ResolvedParams":
        """Resolve the parameters of a request: in a thread if that takes long. Raises InvalidRequest."""
        if not (params.bad_words or params.allowed_token_ids or params.structured_outputs):
            return self.client.frontend.resolve(params, priority=priority)
        return await self.threads.run(partial(self.client.frontend.resolve, params, priority=priority), num_bytes=0)

    async def encode_prompt(self, text: str, *, add_special_tokens: bool, may_exceed: bool = False) -> list[int]:
        """Tokenise in a thread, so that streams continue meanwhile. Raises InvalidRequest for too long a text, and
        ContextLengthExceeded, at once, if it can't fit the context.

        `may_exceed`: accept such a text, since the caller truncates the prompt.
        """
        tokenize = partial(self.tokenize_prompt, text, add_special_tokens=add_special_tokens, may_exceed=may_exceed)
        return await self.threads.run(tokenize, num_bytes=len(text))

    def tokenize_prompt(self, text: str, *, add_special_tokens: bool, may_exceed: bool = False) -> list[int]:
        """The same as `encode_prompt`, for callers that already run in a thread."""
        self.check_prompt(text, may_exceed=may_exceed)
        return self.client.frontend.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_prompt(self, text: str, *, may_exceed: bool = False) -> None:
        """Raise the errors of `encode_prompt`."""
        if not may_exceed:
            check_fits(text, max_model_len=self.client.frontend.max_model_len, longest_token=self.longest_token)
        check_chars(text, self.config.limits)

    def truncate(self, token_ids: list[int], body: GenerationFields | VectorFields, *, is_framed: bool) -> list[int]:
        """Truncate a prompt as its request asks. `is_framed`: `encode_prompt` has added the special tokens of a text.

        Raises InvalidRequest.
        """
        if body.truncate_prompt_tokens is None:
            return token_ids
        return self.client.frontend.tokenizer.truncate(
            token_ids,
            body.truncate_prompt_tokens,
            side=body.truncation_side,
            max_model_len=self.client.frontend.max_model_len,
            is_framed=is_framed,
            for_vector=isinstance(body, VectorFields),
        )

    def decode(self, token_ids: list[int], *, param: str = "prompt") -> str:
        """Convert token ids to text. Raises InvalidRequest, which names `param`, for an id outside the vocabulary."""
        vocab_size = self.client.frontend.tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size}).", param=param)
        return self.client.frontend.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _report_tenants(self) -> None:
        self.rate_limits.record_report(THIS_SERVER, 0, self.kv.tenant_loads())

    def _limits_of(self, request: Request) -> TenantLimits:
        state = request.scope["state"]
        return state.get("limits") or self.tenants.limits(state.get("tenant", ""))

    def _log_request(self, meta: ResponseMeta, prompts: list[PromptInput], params: "SamplingParams") -> None:
        if self.config.enable_log_requests:
            shown = [(p.text or str(p.token_ids))[: self.config.max_log_len] for p in prompts]
            logger.info("request %s: prompts %r, sampling parameters %s", meta.id, shown, params)


def _length_penalty(body: EngineFields) -> float | None:
    """Return the length penalty of a beam search, else None."""
    if not isinstance(body, GenerationFields) or not body.use_beam_search:
        return None
    return 1.0 if body.length_penalty is None else body.length_penalty


def context_of(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context
