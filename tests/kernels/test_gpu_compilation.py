"""The kernels of a step compile for a GPU, without one: no spills, fast copies, and nothing compiled while serving."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.devices.cuda_graphs import GraphedSteps, prompt_buckets
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.devices.transfers import Copy, Fetch
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.layers.moe import MoE
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.group_tensor import GroupFormat
from octavo_engine.ops.triton import (
    decode_attention,
    elementwise,
    expert_linear,
    fp8_linear,
    group_linear,
    paged_attention,
    sampling,
    write_kv,
    write_qkv,
)
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.runner import Runner
from octavo_engine.sampling.grammar_masks import GrammarMasks, GrammarRows
from octavo_engine.sampling.sampler import Sampler, SampleRows, SamplingColumns
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.plan import NewSeq, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.gpu_compiler import GpuCompiler, Launches, MetaSteps, assert_fast, record_layer_launches
from octavo_testing.group_weights import KINDS
from octavo_testing.runner_rig import new, no_vocabulary, step
from octavo_testing.tiny_models import FAMILIES, make_tiny
from torch import Tensor


def test_a_model_compiles_for_hopper() -> None:
    with GpuCompiler.start() as compiler:
        report = compiler.compile_steps("Qwen3ForCausalLM", sm=90)
    attention = ["write_qkv_kernel", "decode_parts_kernel", "merge_parts_kernel"]
    norm, linear = "rms_norm_kernel", "aten::linear"
    layer = [norm, linear, *attention, linear, norm, linear, "gate_kernel", linear]
    assert report.layer_launches == [layer] * 2
    assert {kernel.name for kernel in report.kernels} == {
        *layer,
        "list_parts_kernel",
        "paged_attention_kernel",
        "penalise_kernel",
        "sample_kernel",
    } - {linear}
    assert report.later == 0, "numbers of sequences and blocks compile no kernel again"
    assert_fast(report)


KERNEL_MODULES = (decode_attention, elementwise, fp8_linear, group_linear, expert_linear, paged_attention, sampling,
    write_kv, write_qkv)  # fmt: skip


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels, which would start in the interpreter, for steps on the `meta` device."""

    def launch(name: str) -> Any:
        return defaultdict[object, Any](lambda: lambda *arguments, **options: Launches.add(name))

    for module in KERNEL_MODULES:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, launch(name))


@pytest.fixture
def steps(_no_kernels: None) -> MetaSteps:
    return MetaSteps("Qwen3ForCausalLM", torch.bfloat16)


def run(steps: MetaSteps) -> Tensor:
    return steps.run(seqs=3, tokens=40, max_query_len=30, table_width=5)[0]


def test_a_step_reads_nothing_back_to_the_host(steps: MetaSteps) -> None:
    logits = run(steps)
    assert (logits.dtype, logits.shape) == (torch.float32, (3, steps.model.config.vocab_size))


class MetaDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")

    def fetch(self) -> Fetch:
        return lambda values: values.cpu


def make_runner(steps: MetaSteps, copy: Copy, device: MetaDevice, *, enforce_eager: bool) -> Runner:
    batch = PersistentBatch(
        max_num_seqs=4,
        max_model_len=64,
        block_size=16,
        vocab_size=steps.model.config.vocab_size,
        device=torch.device("meta"),
        copy=copy,
        starts_ahead=True,
    )
    grammars = GrammarMasks(GrammarCompiler(no_vocabulary), vocab_size=batch.vocab_size)
    return Runner(steps.model, steps.backend, batch, grammars, device, enforce_eager=enforce_eager)


def start_decodes(steps: MetaSteps, copy: Copy, **params: Any) -> Callable[[], object]:
    """Start a prompt and two decode steps of three sequences; return the function that waits for the prompts."""
    runner = make_runner(steps, copy, MetaDevice(), enforce_eager=True)
    prompts = [new(i, 3, 4, 5, temperature=0.5 * i, top_p=0.9, **params) for i in range(3)]
    plan = StepPlan(step_id=1, new_seqs=prompts, seqs=[step(i, 0, 3, block_ids=[[i]]) for i in range(3)])
    with torch.inference_mode():
        collect = runner._start(plan)
        for position in (3, 4):
            runner._start(StepPlan(step_id=position, seqs=[step(i, position, 1) for i in range(3)]))
    return collect


@pytest.fixture
def _draws_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("draws", "logit_edits"):
        monkeypatch.setattr(f"octavo_engine.sampling.{module}.runs_triton", lambda logits: True)


@pytest.mark.usefixtures("_draws_on_meta")
@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 3}], ids=str)
def test_decode_steps_one_ahead_read_nothing_back_to_the_host(steps: MetaSteps, fields: dict[str, Any]) -> None:
    collect = start_decodes(steps, to_meta, **fields)
    with pytest.raises(NotImplementedError, match="meta"):
        collect()


@pytest.mark.usefixtures("_draws_on_meta")
def test_a_decode_step_makes_three_copies_to_the_device(steps: MetaSteps) -> None:
    """Its inputs, the parameters of its draws, and the slots of its tokens; a step with prompts has further ones."""
    copies: list[Tensor] = []
    start_decodes(steps, lambda values: copies.append(values) or to_meta(values))  # type: ignore[func-returns-value]
    assert len(copies) == 4 + 2 * 3


def to_meta(values: Tensor) -> Tensor:
    assert values.is_cpu, "a copy of a tensor that is on the device"
    return values.to("meta")


class CountedDevice(MetaDevice):
    """A device on `meta` with graphs, which lists the calls that the host makes for a step."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def fetch(self) -> Fetch:
        return lambda values: self._calls.append("fetch") or values.cpu  # type: ignore[func-returns-value]

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> Any:
        def capture(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            return lambda: self._calls.append("replay"), work()

        return GraphedSteps(
            *(model.forward, limits, prompt_buckets(limits.max_num_seqs, 64), capture, self.torch_device),
            overwrite=lambda target, values: self._calls.append("copy"),
            free_bytes=lambda: 0,
        )


@pytest.mark.usefixtures("_draws_on_meta", "_no_kernels")
@pytest.mark.parametrize("kind", [None, KINDS["int4"]], ids=["plain", "int4"])
def test_the_host_makes_twelve_calls_for_a_step_with_prompts(
    kind: GroupFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, operators of torch, kernels and replays; an eager step launches hundreds for a model of many layers."""
    if kind is not None:
        monkeypatch.setattr("octavo_engine.ops.triton_devices.DEVICES", {"meta"})
    steps = MetaSteps("Qwen3ForCausalLM", torch.bfloat16, kind=kind)
    calls: list[str] = []
    monkeypatch.setattr(Launches, "current", calls)

    def copy(values: Tensor) -> Tensor:
        with monkeypatch.context() as uncounted:
            uncounted.setattr(Launches, "current", None)
            moved = to_meta(values)
        calls.append("copy")
        return moved

    runner = make_runner(steps, copy, CountedDevice(calls), enforce_eager=False)
    with torch.inference_mode():
        runner.capture_graphs()
        runner._start(StepPlan(step_id=1, new_seqs=[new(0, 3, 4, 5)], seqs=[step(0, 0, 3, block_ids=[[0]])]))
        calls.clear()
        with Launches():
            prompt = StepPlan(
                step_id=2, new_seqs=[new(1, *range(9))], seqs=[step(0, 3, 1), step(1, 0, 9, block_ids=[[1]])]
            )
            runner._start(prompt)
    calls.remove("aten::zeros")  # memory of the host
    assert calls.count("replay") == 1
    assert len(calls) == 12, " ".join(calls)


#: Edits of logits; the last is a penalty.
MASKS: list[dict[str, Any]] = [
    {"allowed_token_ids": [3, 4]},
    {"bad_words_token_ids": [[7], [5, 8]]},
    {"min_tokens": 3, "stop_token_ids": [9]},
    {"logit_bias": {3: 1.0}},
    {"thinking_token_budget": 0, "reasoning_end_token_id": 6},
    {"presence_penalty": 0.5},
]


@pytest.mark.usefixtures("_no_kernels")
def test_sampling_reads_nothing_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_engine.ops.triton_devices.DEVICES", {"meta"})
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3}
    kinds = (greedy, drawn, {**drawn, "logprobs": 2}, *MASKS)
    columns, seqs = SamplingColumns(len(kinds)), []
    for slot, params in enumerate(kinds):
        new = NewSeq(seq_id=slot, token_ids=[5], num_prompt_tokens=1, params=SamplingParams(**params))
        row = np.array([5, 0], dtype=np.int32)
        seqs.append(SeqState.from_new_seq(new, slot, row, vocab_size=500, copy=to_meta))
        columns.set(seqs[-1], slot)
    ones = np.ones(len(kinds), dtype=np.int64)
    rows = SampleRows(seqs=seqs, slots=np.arange(len(kinds)), positions=ones, num_drafts=0 * ones)
    shaped = GrammarRows(rows=[1], words=torch.zeros(1, 16, dtype=torch.int32), errors={})
    chosen = Sampler(columns, copy=to_meta).sample(torch.empty(len(kinds), 500, device="meta"), rows, shaped)
    assert (chosen.on_device.device.type, len(chosen.on_device)) == ("meta", len(kinds))
    assert [*chosen.masked] == [*range(3, len(kinds) - 1), 1]
    assert not chosen.errors
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        chosen.results()


#: Launches of a block with experts: the router's product, softmax, choice and two of the scaling; sort and search; two
#: products with a gate between; the sum. A shared expert has five more, and its product with its gate.
EXPERT_LAUNCHES = {
    "MixtralForCausalLM": 11,
    "OlmoeForCausalLM": 9,
    "Qwen2MoeForCausalLM": 15,
    "Qwen3MoeForCausalLM": 11,
}


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize("architecture", EXPERT_LAUNCHES)
def test_a_step_with_experts_reads_nothing_back_to_the_host(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a fixed number of launches, at most 16, so that CUDA graphs take it."""
    monkeypatch.setattr("octavo_engine.ops.triton_devices.DEVICES", {"meta"})
    monkeypatch.setattr(MoE, "__call__", MoE.__call__)  # `record_layer_launches` replaces it
    launches = record_layer_launches(MoE)
    steps = MetaSteps(architecture, torch.bfloat16)
    assert run(steps).dtype == torch.float32
    assert [len(each) for each in launches] == [EXPERT_LAUNCHES[architecture]] * 2
    assert max(EXPERT_LAUNCHES.values()) <= 16
    assert steps.model.waiting_operator is None


#: Groups, and the kernels of products with up to 256 rows and with more.
GROUPS = {name: (kind, "group_linear_kernel", "expand_groups_kernel") for name, kind in KINDS.items()} | {
    "an order": (replace(KINDS["int4"], has_order=True), "group_linear_kernel", "expand_groups_kernel"),
    "rounded": (replace(KINDS["e4m3"], group_size=128, rounds_inputs=True), *["fp8_linear_kernel"] * 2),
}


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(("kind", "few", "many"), GROUPS.values(), ids=GROUPS)
def test_a_step_with_weights_in_groups_reads_nothing_back_to_the_host(
    kind: GroupFormat, few: str, many: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_engine.ops.triton_devices.DEVICES", {"meta"})
    steps = MetaSteps(architecture, torch.bfloat16, kind=kind)
    for tokens, kernel in ((40, few), (300, many)):
        with monkeypatch.context() as recorded:
            recorded.setattr(Launches, "current", launches := [])
            logits, _ = steps.run(seqs=3, tokens=tokens, max_query_len=tokens - 2, table_width=30)
        assert logits.shape == (3, steps.model.config.vocab_size)
        assert kernel in launches
        assert ("grouped_values_kernel" in launches) == ("Moe" in architecture)
    assert steps.model.waiting_operator is None


#: Families that read or write values of the host in each step, and the operator: PhiMoE copies its frequencies.
WAITING = {"phimoe": "aten._to_copy.default"}


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_transformers_reads_nothing_back_to_the_host(family: str, tmp_path: Path) -> None:
    config = load_model_config(resolve_model(str(make_tiny(family, tmp_path))))
    steps = MetaSteps(family, torch.bfloat16, config=config)
    assert steps.model.waiting_operator == WAITING.get(family)
    assert run(steps).shape == (3, config.vocab_size)


def test_a_planted_synchronisation_fails(steps: MetaSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: CudaBackend, spec: AttentionSpec, q: Tensor, batch: AttentionBatch) -> Tensor:
        return q * batch.seq_lens.max().item()

    monkeypatch.setattr(CudaBackend, "_attend", attend)
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        run(steps)


def test_a_planted_tensor_of_the_host_fails(steps: MetaSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: CudaBackend, spec: AttentionSpec, q: Tensor, batch: AttentionBatch) -> Tensor:
        return q + torch.ones(q.shape[1:], dtype=q.dtype)

    monkeypatch.setattr(CudaBackend, "_attend", attend)
    with pytest.raises(RuntimeError, match="device"):
        run(steps)
