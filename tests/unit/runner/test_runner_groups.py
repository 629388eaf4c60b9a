"""Models whose weights stay in groups, as on a GPU: they compute as expanded ones do, in the planned memory."""

import gc
import json
import logging
import math
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MemoryInfo
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.moe import Experts
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner import capacity, weight_formats
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.executor import Executor
from octavo_engine.runner.load import load
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.model_loading import load_checkpoint, load_model
from octavo_engine.runner.weight_formats import (
    LOADED_GROUPS,
    kept_formats,
    log_activations,
    log_expanded,
    log_quantised,
)
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.gguf_tensors import GROUP_FORMATS
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.group_weights import KINDS, groups_kept
from octavo_testing.paged import PagedDriver
from octavo_testing.quantised_tiny import METHODS, make_quantised
from octavo_testing.tiny_models import LENGTH, TINY, Tiny, make_tiny
from octavo_testing.triton_device import triton_kernels
from safetensors.torch import load_file, save_file
from torch import Tensor

ACT_ORDER = Path(__file__).parents[1] / "weights" / "quantised_checkpoints" / "act_order"
DEVICE, GPU = CpuDevice(), CudaDevice()
TOKENS = list(range(3, 40))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def planned(files: ModelFiles, **fields: Any) -> MemoryPlan:
    known = {"model": files.name, "dtype": "float16", "num_gpu_blocks_override": 20, "max_model_len": LENGTH}
    config = EngineConfig(**known | fields)
    with groups_kept():
        return plan_memory(config, DEVICE, load_model_config(files), stored_tensors(files))


def loaded(files: ModelFiles, **fields: Any) -> Model:
    return load_model(DEVICE, files, load_model_config(files), planned(files, **fields))


def expanded(files: ModelFiles) -> Model:
    config = EngineConfig(model=files.name, dtype="float16", num_gpu_blocks_override=20, max_model_len=LENGTH)
    model_config = load_model_config(files)
    return load_model(DEVICE, files, model_config, plan_memory(config, DEVICE, model_config))


def logits(model: Model) -> Tensor:
    return PagedDriver(model).feed({0: TOKENS})[0]


def projections(model: Model) -> set[str]:
    return {name for name in model.named_shapes() if name.endswith("_proj.weight")}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_groups_computes_as_the_expanded_one(method: str, tmp_path: Path) -> None:
    files = resolve_model(str(make_quantised("llama", method, tmp_path, group=32, block=(24, 32))[0]))
    model, plan = loaded(files), planned(files)
    assert model.group_tensors() == projections(model)
    assert not model.block_tensors()
    assert plan.model.weights_bytes == model.weights_bytes() < expanded(files).weights_bytes()
    torch.testing.assert_close(logits(model), logits(expanded(files)), atol=0.05, rtol=0.01)


def test_a_checkpoint_of_the_bare_model_stays_in_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its tensors lack the prefix of the model with a head, as those of embedding models do."""
    folder, _ = make_quantised("llama", "awq", tmp_path, group=32)
    want = logits(loaded(resolve_model(str(folder))))
    whole = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    assert bare.keys() != whole.keys()
    save_file(bare, folder / "model.safetensors")
    files, config = resolve_model(str(folder)), EngineConfig(model=str(folder))
    model_config = load_model_config(files)
    checkpoint = Checkpoint(files=files, config=model_config, stored=stored_tensors(files))
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        model = load_checkpoint(DEVICE, checkpoint, planned(files), config=config).model
    assert not caplog.messages
    assert model.group_tensors() == projections(model)
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize(
    ("architecture", "qtype"),
    [
        ("llama", "Q4_0"),
        *(slow(architecture, qtype) for architecture in ("gemma3", "gpt2", "qwen2moe") for qtype in GROUP_FORMATS),
    ],
)
def test_a_gguf_in_groups_computes_as_the_expanded_one(architecture: str, qtype: str, tmp_path: Path) -> None:
    """Embeddings and K types are expanded."""
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, architecture, tiny_model(architecture), qtype=qtype, others={"attn_output": "Q5_0"})
    files = resolve_model(str(path))
    model, plan = loaded(files), planned(files)
    stored = {name for name, info in stored_tensors(files).items() if info.type.name == qtype}
    kept = {name for name in stored if not any(part in name for part in ("embed", ".wte", ".wpe"))}
    assert model.group_tensors() == kept != set()
    assert plan.model.weights_bytes == model.weights_bytes()
    torch.testing.assert_close(logits(model), logits(expanded(files)), atol=0.05, rtol=0.01)


def test_a_cpu_keeps_blocks_and_a_gpu_keeps_groups(tmp_path: Path) -> None:
    for kind in KINDS.values():
        assert [GPU.keeps(kind, each) for each in (torch.float16, torch.bfloat16, torch.float32)] == [True, True, False]
        assert not DEVICE.keeps(kind, torch.bfloat16)
    assert not GPU.keeps(QUANTISED_FORMATS["Q8_0"], torch.bfloat16)
    assert not DEVICE.keeps(QUANTISED_FORMATS["Q8_0"], torch.float16)
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"), qtype="Q8_0")
    stored = stored_tensors(resolve_model(str(path)))
    assert {each.name for each in kept_formats(stored, GPU, torch.float16).values()} == {"Q8_0"}
    assert not kept_formats(stored, GPU, torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_auto_is_that_of_a_gpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "default_dtype", lambda self, model: getattr(torch, dtype))
    files = resolve_model(str(make_quantised("llama", "awq", tmp_path, group=32)[0]))
    plan = planned(files, dtype="auto")
    assert str(plan.dtype) == f"torch.{dtype}"
    assert plan.block_formats


def test_one_line_names_the_cause_of_an_expansion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), qtype="Q4_0", others={"attn_k": "Q5_1", "ffn_down": "Q8_0"})
    files = resolve_model(str(path))
    stored = stored_tensors(files)
    for dtype, reasons in (
        (torch.float16, ["the kernels do not support Q5_1; another part of their fused weight has another format"]),
        (torch.float32, ["Q5_1; the kernels for quantised weights compute in 16 bits; --dtype float32 expands them"]),
    ):
        model = loaded(files, dtype=str(dtype).removeprefix("torch."))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
            log_expanded(stored, model.group_tensors(), GPU, dtype)
        (message,) = caplog.messages
        assert all(reason in message for reason in reasons)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama", "int8"),
        ("qwen2_moe", "int4"),
        *(slow(name, quantization) for name in ("gpt2", "phi3") for quantization in LOADED_GROUPS),
    ],
)
def test_weights_are_quantised_while_they_load(
    name: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = resolve_model(str(make_tiny(name, tmp_path)))
    with groups_kept():
        plan = planned(files, quantization=quantization)
    assert plan.quantise_to == LOADED_GROUPS[quantization]
    model = load_model(DEVICE, files, load_model_config(files), plan)
    names = model.quantised_tensors()
    assert names
    assert not [each for each in names if "embed" in each or "head" in each]
    assert plan.model.weights_bytes == model.weights_bytes()
    exact, found = (logits(expanded(files)), logits(model))
    distance = (found - exact).norm() / exact.norm()
    assert 0 < distance < {"int8": 0.05, "int4": 0.6}[quantization]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_quantised(model, plan.quantise_to)
    (message,) = caplog.messages
    assert message.startswith(f"{len(names)} tensors were quantised to {quantization} while loading")
    assert ("(40, 56)" in message) == (name == "qwen2_moe")


@pytest.mark.parametrize("keeps", [groups_kept, nullcontext], ids=["groups", "blocks"])
def test_the_plan_counts_the_orders_of_inputs(keeps: Any, tmp_path: Path) -> None:
    """Each fused layer has one order, of 4 bytes for each input; one whose groups are in order has none."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_gpu_blocks_override": 20, "max_model_len": 64}
    tensors = load_file(ACT_ORDER / "model.safetensors")
    in_order = {name: values.sort().values for name, values in tensors.items() if name.endswith("g_idx")}
    save_file(tensors | in_order, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((ACT_ORDER / "config.json").read_bytes())
    found = []
    for folder in (ACT_ORDER, tmp_path):
        config = EngineConfig(model=str(folder), **settings)
        files = resolve_model(str(folder))
        model_config = load_model_config(files)
        with keeps():
            plan = plan_memory(config, DEVICE, model_config, stored_tensors(files))
        model = load_model(DEVICE, files, model_config, plan)
        assert plan.model.weights_bytes == model.weights_bytes()
        found.append(model)
    inputs = [each.spec.in_features for each in found[0].modules() if isinstance(each, Linear) and not each.spec.wide]
    assert found[0].weights_bytes() - found[1].weights_bytes() == 4 * sum(inputs) > 0


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_ranks_choose_equal_groups_in_the_planned_memory(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 128 divide the inputs of `o_proj` and `down_proj`, and not the halves of them that ranks have."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32}
    monkeypatch.setitem(TINY, "wide", Tiny(model_type="llama", config=sizes))
    files = resolve_model(str(make_tiny("wide", tmp_path)))
    config = EngineConfig(
        model=files.name, dtype="float16", num_gpu_blocks_override=20, max_model_len=64, quantization=quantization  # type: ignore[arg-type]
    )  # fmt: skip
    model_config = load_model_config(files)
    found = []
    for rank in range(2):
        group = Group(rank, 2)
        with groups_kept():
            plan = plan_memory(config, DEVICE, model_config, stored_tensors(files), group=group)
        model = load_model(DEVICE, files, model_config, plan, group=group)
        assert plan.model.weights_bytes == model.weights_bytes()
        methods = [each.method for each in model.modules() if isinstance(each, Linear)]
        found.append([method.weight.format.group_size for method in methods if isinstance(method, GroupMethod)])
    assert found == [[128, 32, 128, 32] * 4] * 2


def built(files: ModelFiles, **fields: Any) -> Model:
    formats = kept_formats(stored_tensors(files), GPU, torch.float16)
    build: dict[str, Any] = {"dtype": torch.float16, "device": "cpu", "max_model_len": LENGTH, "block_formats": formats}
    return build_model(load_model_config(files), **build | fields)


def test_logs_count_the_layers_of_experts_that_a_gpu_has_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 4}
    monkeypatch.setitem(TINY, "moe", Tiny(model_type="qwen3_moe", config=TINY["qwen3_moe"].config | sizes))
    files = resolve_model(str(make_quantised("moe", "fp8_tensor", tmp_path)[0]))
    odd_sizes = resolve_model(str(make_tiny("qwen2_moe", tmp_path)))
    caplog.set_level(logging.INFO, logger=weight_formats.__name__)
    found: list[list[str]] = []
    for kernels in (triton_kernels(), nullcontext()):
        with kernels:
            models = built(files), built(odd_sizes, quantise_to=LOADED_GROUPS["int8"])
        assert [any(each.stacks for each in model.modules() if isinstance(each, Experts)) for model in models] == [
            not found
        ] * 2
        caplog.clear()
        log_activations(files.quantisation, models[0])
        log_quantised(models[1], LOADED_GROUPS["int8"])
        found.append(list(caplog.messages))
    assert "6 linear layers round them to FP8 (e4m3), 8 use 16 bits" in found[0][0]
    for _, message in found:
        assert "18 linear layers stay in float16, as their numbers of inputs (40, 56) are not multiples of" in message


def test_quantised_weights_compute_in_16_bits(tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny("llama", tmp_path)))
    for dtype in ("float16", "bfloat16"):
        assert planned(files, quantization="int8", dtype=dtype).quantise_to
    with pytest.raises(StartupError, match="--quantization int8 computes in bfloat16 or float16: omit --dtype float32"):
        planned(files, quantization="int8", dtype="float32")


def test_a_gpu_of_less_memory_than_the_codes_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve_model(str(make_quantised("llama", "awq", tmp_path, group=32)[0]))
    plan = planned(files)
    less = MemoryInfo(total_bytes=plan.model.weights_bytes // 2, available_bytes=plan.model.weights_bytes // 2)
    monkeypatch.setattr(CpuDevice, "memory", lambda self, num_ranks=1: less)
    with pytest.raises(StartupError, match="memory") as failure:
        planned(files)
    assert failure.value.code == "OutOfMemory"
    assert "\n" not in str(failure.value)


def test_the_method_must_be_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = str(make_quantised("llama", "awq", tmp_path, group=32)[0])
    with pytest.raises(StartupError, match="--quantization fp8, but the checkpoint's method is awq"):
        resolve_files(EngineConfig(model=folder, quantization="fp8"))


def first_logprobs(executor: Executor, seq_id: int) -> Any:
    params = SamplingParams(temperature=0, logprobs=20)
    new = NewSeq(seq_id=seq_id, token_ids=TOKENS, num_prompt_tokens=len(TOKENS), params=params)
    blocks = [[1 + seq_id, 4 + seq_id, 7 + seq_id]]
    step = SeqStep(seq_id=seq_id, start=0, num_tokens=len(TOKENS), sample=True, block_ids=blocks)
    result = executor.submit(StepPlan(step_id=seq_id, new_seqs=[new], seqs=[step])).result()
    assert result.error is None
    return result.seqs[0].logprobs


def num_in_memory() -> int:
    return sum(isinstance(each, GroupMethod) for each in gc.get_objects())


@pytest.mark.parametrize("method", ["awq", None, *(slow(each) for each in ("fp8_block", "nf4", "gptq", "int8"))])
def test_sleep_frees_groups_and_a_wake_loads_equal_bits(method: str | None, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_threads": 1, "num_gpu_blocks_override": 20, "max_model_len": 64}
    if method is None:
        folder, fields = make_tiny("llama", tmp_path), fields | {"quantization": "int4"}
    else:
        folder, _ = make_quantised("llama", method, tmp_path, group=32, block=(24, 32))
    with groups_kept():
        executor, _ = load(EngineConfig(model=str(folder), dtype="float16", **fields))
        before = first_logprobs(executor, 0)
        assert num_in_memory() == 4 * 4  # qkv, o, gate and up, down of each layer
        executor.release("weights")
        assert num_in_memory() == 0
        executor.restore("weights")
        assert first_logprobs(executor, 1) == before
        executor.shutdown()


class PlannedGpu(CudaDevice):
    """A GPU of 80 GiB that plans, and computes nothing."""

    def prepare(self, config: EngineConfig) -> None:
        """Set no device."""

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return MemoryInfo(total_bytes=80 * GIB, available_bytes=79 * GIB, utilization=0.9)

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CudaBackend(specs, block_size, dtype, "meta", num_programs=132)


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "rope_theta": 500000.0,
    "eos_token_id": 2,
    "quantization_config": {"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True, "version": "gemm"},
}  # fmt: skip


def write_llama_70b(folder: Path) -> None:
    """Write the header of a checkpoint in AWQ of groups of 128, and a hole for its 40 GB of tensors."""
    header: dict[str, Any] = {}
    end = 0

    def add(name: str, dtype: str, *shape: int) -> None:
        nonlocal end
        start, end = end, end + math.prod(shape) * {"I32": 4, "F16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}

    size, inner, keys = 8192, 28672, 1024
    layers = {"self_attn.q_proj": (size, size), "self_attn.k_proj": (size, keys), "self_attn.v_proj": (size, keys),
        "self_attn.o_proj": (size, size), "mlp.gate_proj": (size, inner), "mlp.up_proj": (size, inner),
        "mlp.down_proj": (inner, size)}  # fmt: skip
    for layer in range(80):
        for name, (inputs, outputs) in layers.items():
            prefix = f"model.layers.{layer}.{name}"
            add(f"{prefix}.qweight", "I32", inputs, outputs // 8)
            add(f"{prefix}.qzeros", "I32", inputs // 128, outputs // 8)
            add(f"{prefix}.scales", "F16", inputs // 128, outputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{norm}.weight", "F16", size)
    for name, *shape in (("model.embed_tokens", 128256, size), ("model.norm", size), ("lm_head", 128256, size)):
        add(f"{name}.weight", "F16", *shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))


def test_a_llama_of_70_billion_weights_in_awq_fits_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama_70b(tmp_path)
    monkeypatch.setattr(capacity, "open_device", lambda kind: PlannedGpu())
    planned = capacity.plan_capacity(EngineConfig(model=str(tmp_path), device="cuda"))
    assert (planned.device, planned.dtype, planned.max_model_len) == ("cuda", "float16", 8192)
    assert planned.weights_bytes <= 1.03 * planned.file_bytes
    assert planned.kv_bytes >= 20 * GIB
    assert planned.weights_bytes + planned.kv_bytes <= 0.9 * planned.total_bytes
