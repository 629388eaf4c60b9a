"""`TracingScheduler`: a scheduler that records its inputs and its decisions, one JSON object per line.

The first line holds the configuration; each further line one call: add, prepared, abort, fork, propose, reset, step
(with time and costs) or commit. A step line ends with the plan in compact form, a commit line with the outputs that
ended. Sampled tokens are inputs, so a replay needs no model; log-probabilities affect no decision and are only counted.
A trace contains the prompts, but of images only positions and digests. The class does no I/O itself: `write` receives a
line with its newline.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from octavo_engine.core.scheduler import NO_COSTS, Scheduler
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqId, SeqStep, StepCosts, StepPlan, StepResult
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import EngineRequest, ErrorInfo, ImageInput, SeqOutput
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs

TRACE_VERSION = 2
_PARAMS = SamplingParams()
_REQUEST = EngineRequest(request_id="", prompt_token_ids=[], params=_PARAMS)


class TracingScheduler(Scheduler):
    def __init__(
        self,
        config: SchedulerConfig,
        write: Callable[[str], object],
        *,
        kv_events: bool = False,
        kv_tokens: bool = False,
    ) -> None:
        super().__init__(config, kv_events=kv_events, kv_tokens=kv_tokens)
        self._write = write
        self._write_line(trace=TRACE_VERSION, config=asdict(config) | {"hash_root": config.hash_root.hex()})

    def add(self, request: EngineRequest, now: float, *, deferred: bool = False) -> None:
        super().add(request, now, deferred=deferred)
        self._write_line(add=_encode_request(request), now=now, **({"deferred": True} if deferred else {}))

    def prepared(self, request_id: str, now: float, *, error: ErrorInfo | None = None) -> list[SeqOutput]:
        outputs = super().prepared(request_id, now, error=error)
        self._write_line(prepared=request_id, now=now, error=error and error.message, ended=encode_ended(outputs))
        return outputs

    def abort(self, request_id: str, index: int | None = None) -> list[SeqOutput]:
        outputs = super().abort(request_id, index)
        self._write_line(abort=request_id, index=index, ended=encode_ended(outputs))
        return outputs

    def step(self, now: float, costs: StepCosts = NO_COSTS) -> StepPlan:
        plan = super().step(now, costs)
        self._write_line(step=now, costs=asdict(costs), plan=encode_plan(plan))
        return plan

    def commit(self, result: StepResult, now: float) -> list[SeqOutput]:
        outputs = super().commit(result, now)
        seqs = [
            [r.seq_id, r.token_ids, len(r.prompt_logprobs or ()), *([r.error.message] if r.error else [])]
            for r in result.seqs
        ]
        self._write_line(commit=result.step_id, now=now, seqs=seqs, error=result.error, ended=encode_ended(outputs))
        return outputs

    def fork(self, seq_id: SeqId) -> SeqId:
        child = super().fork(seq_id)
        self._write_line(fork=seq_id, child=child)
        return child

    def propose(self, seq_id: SeqId, draft_token_ids: list[int]) -> None:
        super().propose(seq_id, draft_token_ids)
        self._write_line(propose=seq_id, tokens=draft_token_ids)

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        self._write_line(reset=done)
        return done

    def _write_line(self, **entry: Any) -> None:
        self._write(json.dumps(entry, separators=(",", ":"), default=str) + "\n")


def encode_plan(plan: StepPlan) -> dict[str, Any]:
    """Encode all decisions of a plan, without empty parts and without tokens, which follow from the inputs."""
    parts = {
        "seqs": [_encode_step(step) for step in plan.seqs],
        "new": [[new.seq_id, new.seed, len(new.token_ids)] for new in plan.new_seqs],
        "drop": plan.dropped_seqs,
        "out": [[*pair] for pair in plan.swap_out],
        "in": [[*pair] for pair in plan.swap_in],
        "copy": [[*pair] for pair in plan.copies],
        "drop_images": [digest.hex() for digest in plan.dropped_images],
        "encode": [[*image] for image in plan.encode],
    }
    return {"id": plan.step_id} | {name: part for name, part in parts.items() if part}


def encode_ended(outputs: list[SeqOutput]) -> list[list[Any]]:
    return [[o.request_id, o.index, o.finish_reason, o.stop_reason] for o in outputs if o.finish_reason]


def decode_request(entry: dict[str, Any]) -> EngineRequest:
    params: dict[str, Any] = entry["params"]
    if (structured := params.get("structured_outputs")) is not None:
        params = params | {"structured_outputs": StructuredOutputs(**structured)}
    pooling = entry.get("pooling")
    read = {"params": SamplingParams(**params), "pooling": None if pooling is None else PoolingParams(**pooling)}
    images = tuple(
        ImageInput(start=start, length=length, digest=bytes.fromhex(digest), data=b"")
        for start, length, digest in entry.get("images", ())
    )
    return EngineRequest(**entry | read | {"images": images})


def decode_config(entry: dict[str, Any]) -> SchedulerConfig:
    return SchedulerConfig(**entry | {"hash_root": bytes.fromhex(entry["hash_root"])})


def _encode_request(request: EngineRequest) -> dict[str, Any]:
    params = _without_defaults(request.params, _PARAMS)
    if request.params.structured_outputs is not None:
        params["structured_outputs"] = asdict(request.params.structured_outputs)
    pooling = {} if request.pooling is None else {"pooling": asdict(request.pooling)}
    images = [[image.start, image.length, image.digest.hex()] for image in request.images]
    return _without_defaults(request, _REQUEST) | {"params": params} | pooling | ({"images": images} if images else {})


def _without_defaults(record: Any, default: Any) -> dict[str, Any]:
    values = ((f.name, getattr(record, f.name)) for f in fields(record))
    return {name: value for name, value in values if name == "max_tokens" or value != getattr(default, name)}


def _encode_step(step: SeqStep) -> list[Any]:
    row: list[Any] = [step.seq_id, step.start, step.num_tokens, int(step.sample)]
    if step.block_ids or step.draft_token_ids or step.logits_from is not None or step.num_prompt_logprobs:
        row += [step.table_start, step.block_ids, step.draft_token_ids, step.logits_from, step.num_prompt_logprobs]
    return row
