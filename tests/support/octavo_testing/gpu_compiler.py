"""Compiles the Triton kernels of whole model steps for NVIDIA GPUs on a machine without one.

Triton asks its driver only for the target, and every launch becomes a warm-up: Triton specialises and compiles the
kernel for the real arguments, which are `meta` tensors, and launches nothing. Such tensors also refuse to be read by
the host and to be mixed with CPU tensors. Triton must be imported with its compiler, so this runs as a process of its
own: `GpuCompiler` starts it, and `main` forks for each model, so that imports are paid once and no model finds kernels
of another in memory. Compiled kernels and their properties stay in `CACHE`, Triton's own cache on disk, for later
models and later runs.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from octavo_engine.ops.rank_group import Group
from torch.utils._python_dispatch import TorchDispatchMode

#: Shapes of checkpoints on the hub, where transformers' defaults for the architecture differ. Two layers compile all
#: kernels, except that Gemma 3's windows alternate less often.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("gpt2", {"n_layer": 2}),
    "Gemma2ForCausalLM": ("gemma2", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    "Gemma3ForCausalLM": ("gemma3_text", {"num_hidden_layers": 6}),
    "LlamaForCausalLM": ("llama", {"num_key_value_heads": 8}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", {}),
    "OPTForCausalLM": ("opt", {"num_attention_heads": 32, "hidden_size": 2560}),  # heads of 80
    "OlmoeForCausalLM": ("olmoe", {}),
    "Phi3ForCausalLM": ("phi3", {}),  # heads of 96
    "Qwen2ForCausalLM": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen3ForCausalLM": ("qwen3", {"num_attention_heads": 16, "num_key_value_heads": 8}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {"head_dim": 128, "norm_topk_prob": True}),
}
#: Well-known models that several GPUs divide: architecture, and differences from transformers' defaults.
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": ("LlamaForCausalLM", {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}),
    "Llama-3-70B": (
        "LlamaForCausalLM",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5-7B": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4}),
}
CACHE = Path(__file__).parents[3] / "build" / "gpu-kernels"
#: Bytes of shared memory that a block of threads may use: on every GPU since sm_80 (sm_86 and sm_89 have the least),
#: and on sm_90, whose tiles are larger.
MAX_SHARED_BYTES = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel. `shared_bytes` of a block, `spill_bytes` of a thread; the rest counts instructions."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    copies_16: int  # asynchronous copies of 16 bytes to shared memory
    narrow_copies: int
    products: int  # of tensor cores
    group_products: int  # of them by groups of four warps, which only sm_90 has
    fp8_products: int  # of them of FP8
    num_warps: int
    e4m3_conversions: int
    fused: int  # fp32 multiplications that are fused with an addition, other than those within divisions
    longest_loop: int  # its instructions


@dataclass(frozen=True, slots=True)
class Report:
    """`kernels` of the first step of each kind, and how many `later` steps compiled.

    `layer_launches`: what each decoder layer of a decode step launches, of Triton and of torch.
    """

    sm: int
    kernels: list[Kernel]
    later: int
    layer_launches: list[list[str]]


class GpuCompiler:
    """The other process. `start` keeps it until the end of a `with` statement."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @staticmethod
    @contextmanager
    def start() -> Iterator["GpuCompiler"]:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE)}
        command = [sys.executable, "-m", "octavo_testing.gpu_compiler"]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield GpuCompiler(process)

    def compile_steps(self, model: str, *, sm: int, dtype: str = "bfloat16", ranks: int = 1) -> Report:
        """Compile the steps of a model for compute capability `sm` (90: 9.0).

        `ranks`: compile what the first of several ranks computes.
        """
        return self._compile("model", sm, model, dtype, ranks)

    def compile_attention(
        self, heads: int, kv_heads: int, head_dim: int, *, sm: int, dtype: str, cache: str = ""
    ) -> Report:
        """Compile the attention of a step of prompts and decodes. `cache`: the type of its KV cache, if another one."""
        return self._compile("attention", sm, heads, kv_heads, head_dim, dtype, cache or dtype)

    def compile_groups(self, kind: str, group: int, *, sm: int, dtype: str, scale_dtype: str) -> Report:
        """Compile the products of all tiles with a weight in groups, of a kind of `group_cases.KINDS`."""
        return self._compile("groups", sm, kind, group, dtype, scale_dtype)

    def compile_fp8(self, out: int, size: int, num_groups: int, *, sm: int, dtype: str) -> Report:
        """Compile the FP8 kernels of all tiles for a weight [out, size], also where torch has a product."""
        return self._compile("fp8", sm, out, size, num_groups, dtype)

    def _compile(self, kind: str, sm: int, *arguments: Any) -> Report:
        assert self._process.stdout is not None
        print(json.dumps([kind, sm, *arguments]), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline() or "null")
        assert found is not None, "the compilation failed: its traceback is in the captured stderr"
        kernels = [Kernel(**kernel) for kernel in found["kernels"]]
        return Report(sm, kernels, found["later"], found["layer_launches"])


def assert_fast(report: Report, *, tensor_cores: bool = True) -> None:
    """Assert the properties of machine code without which a kernel is several times slower, or does not start."""
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[report.sm], kernel
        if kernel.name in ("sample_kernel", "penalise_kernel"):
            assert kernel.fused == 0, "the definitions of draws and penalties round after each operation"
        if kernel.name in ("paged_attention_kernel", "decode_parts_kernel"):
            assert kernel.copies_16 >= 8, kernel
            assert bool(kernel.products) == tensor_cores, kernel
        if kernel.name == "paged_attention_kernel" and report.sm == 90 and tensor_cores:
            assert kernel.group_products, kernel
            assert kernel.num_warps == 8, kernel
    grouped = [kernel for kernel in report.kernels if kernel.name == "expert_linear_kernel"]
    assert len(grouped) in (0, 6), "two products of each tile, all compiled before the first step"
    for kernel, rows in zip(grouped, (16, 16, 64, 64, 128, 128), strict=False):
        assert (kernel.copies_16 >= 8, kernel.narrow_copies) == (True, 0), kernel
        assert bool(kernel.products) == tensor_cores, kernel
        assert bool(kernel.group_products) == (report.sm == 90 and rows >= 64 and tensor_cores), kernel


class TargetDriver:
    """A Triton driver without a device."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches(TorchDispatchMode):
    """Lists the operators of torch that launch something; kernels of Triton are added by `record_compilations`."""

    current: list[str] | None = None

    @classmethod
    def add(cls, name: str) -> None:
        if cls.current is not None:
            cls.current.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            Launches.add(func.name())
        return func(*args, **(kwargs or {}))


def record_layer_launches(layer: type) -> list[list[str]]:
    """Return a list to which each call of a layer of this class appends what it launched."""
    found: list[list[str]] = []
    call = layer.__call__

    def counted(self: Any, *args: Any) -> Any:
        Launches.current = []
        try:
            with Launches():
                return call(self, *args)
        finally:
            found.append(Launches.current)
            Launches.current = None

    layer.__call__ = counted  # type: ignore[method-assign]
    return found


def record_compilations(sm: int) -> dict[int, Any]:
    """Make every launch in this process compile for `sm` instead; return the kernels by their `id`, as they come."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(TargetDriver(sm))
    kernels: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = kernel
        Launches.add(self.__name__)
        return kernel

    JITFunction.run = compile_only
    return kernels


def measure_once(kernel: Any) -> dict[str, Any]:
    """Return the properties of a compiled kernel, from the cache if this file measured the same kernel before."""
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256(kernel.hash.encode() + Path(__file__).read_bytes()).hexdigest()
    cache = get_cache_manager(key)
    path = cache.get_file("measured.json") or cache.put(json.dumps(asdict(measure(kernel))), "measured.json")
    measured: dict[str, Any] = json.loads(Path(path).read_text())
    return measured


def measure(kernel: Any) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = _cuobjdump("--dump-resource-usage", file.name), _cuobjdump("--dump-sass", file.name)
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK", "LOCAL"))
    instructions = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", code, re.M))
    copies = {name: count for name, count in instructions.items() if name.startswith("LDGSTS")}

    def count_of(*prefixes: str) -> int:
        return sum(count for name, count in instructions.items() if name.startswith(prefixes))

    fused = instructions["FFMA"]
    if "div.rn.f32" in kernel.asm["ptx"]:  # it has fused steps of its own, and is rounded as the exact quotient is
        fused = len(re.findall(r"\b(?:mul|fma)\.[a-z.]*f32", kernel.asm["ptx"])) - instructions["FMUL"]
    return Kernel(
        name=kernel.metadata.name,
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=kernel.metadata.shared,
        copies_16=sum(count for name, count in copies.items() if name.endswith(".128")),
        narrow_copies=sum(count for name, count in copies.items() if not name.endswith(".128")),
        fused=fused,
        products=count_of("HMMA", "HGMMA", "QMMA", "QGMMA"),
        group_products=count_of("HGMMA", "QGMMA"),
        fp8_products=count_of("QMMA", "QGMMA"),
        num_warps=kernel.metadata.num_warps,
        e4m3_conversions=sum(count for name, count in instructions.items() if "E4M3" in name),
        longest_loop=longest_loop(code),
    )


def longest_loop(code: str) -> int:
    """Return the number of instructions of the longest loop, which a jump back ends."""
    places: dict[int, int] = {}
    longest = 0
    for address, instruction in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.M):
        places[int(address, 16)] = len(places)
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target is not None and int(target[1], 16) in places:
            longest = max(longest, len(places) - places[int(target[1], 16)])
    return longest


def _cuobjdump(option: str, path: str) -> str:
    import triton.backends.nvidia as nvidia

    program = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    return subprocess.run([program, option, path], check=True, capture_output=True, text=True).stdout


class FirstOfMany(Group):
    """Rank 0 of several, whose collective operations leave its own values."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] * self.size


class MetaSteps:
    """A model, or the part of one rank, on the `meta` device, with the CUDA backend, and its steps.

    `config`: of a model that is not among `MODELS`. `sm`: the compute capability that attention chooses its tiles for.
    `kind`: the groups that all linear layers but the head and routers have.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, ranks: int = 1, config: Any = None, sm: int = 80, kind: Any = None
    ) -> None:
        from octavo_engine.models.registry import build_model
        from octavo_engine.ops.cuda_backend import CudaBackend

        config = config or _model_config(name)
        max_model_len = min(8192, config.max_position_embeddings)
        group = FirstOfMany(0, ranks)
        build = partial(build_model, config, dtype=dtype, device="meta", max_model_len=max_model_len, group=group)
        self.model = build()
        if kind is not None:
            names = [name for name in self.model.named_shapes() if name.endswith("_proj.weight")]
            self.model = build(block_formats=dict.fromkeys(names, kind))
        self.model.finish_loading()
        self.backend = CudaBackend(self.model.kv_specs(), 16, dtype, "meta", num_programs=400, has_wgmma=sm == 90)
        self.backend.allocate(1000)

    def run(self, *, seqs: int, tokens: int, max_query_len: int, table_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; return its logits and tokens."""
        from octavo_engine.ops.attention import AttentionBatch, ForwardContext
        from octavo_engine.ops.triton import elementwise, sampling

        batch = AttentionBatch(
            query_start=_ints(seqs + 1),
            seq_lens=_ints(seqs),
            block_tables=_ints(seqs, table_width),
            slots=_ints(tokens),
            max_query_len=max_query_len,
            max_seq_len=16 * table_width,
            num_keys=16 * table_width * seqs,
        )
        context = ForwardContext(batch=batch, backend=self.backend)
        with torch.inference_mode():
            self.backend.begin_step(batch)
            hidden = self.model.forward(_ints(tokens), _ints(tokens), context)
            logits = self.model.logits(hidden[:seqs])
            counts = torch.empty(logits.shape, dtype=torch.int16, device="meta")
            elementwise.penalise(logits, counts, _ints(seqs, 6), torch.empty(seqs, dtype=torch.int64, device="meta"))
            return logits, sampling.sample(logits, _ints(seqs, 8))


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _model_config(name: str) -> Any:
    from octavo_engine.sources.model_config import load_model_config
    from octavo_engine.sources.model_files import ModelFiles
    from transformers import AutoConfig

    architecture, more = DIVIDED.get(name, (name, {}))
    model_type, differences = MODELS[architecture]
    layers = {} if model_type == "gpt2" else {"num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **{**layers, **differences, **more}).to_dict()
    config["architectures"] = [architecture]
    return load_model_config(ModelFiles(name=architecture, root=Path(), load_format="dummy", config=config))


def compile_model(sm: int, model: str, dtype: str, ranks: int) -> dict[str, Any]:
    """Compile the steps of a model in this process; return the fields of a `Report`."""
    from octavo_engine.models.decoder import DecoderLayer

    compiled = record_compilations(sm)
    steps = MetaSteps(model, getattr(torch, dtype), ranks, sm=sm)
    layers = record_layer_launches(DecoderLayer)
    steps.run(seqs=7, tokens=7, max_query_len=1, table_width=33)
    layer_launches = list(layers)
    steps.run(seqs=3, tokens=700, max_query_len=300, table_width=33)
    kernels = list(compiled.values())
    for seqs in (1, 2, 16, 17, 256, 300):
        for width in (1, 2, 16, 17, 512):
            steps.run(seqs=seqs, tokens=seqs, max_query_len=1, table_width=width)
            steps.run(seqs=seqs, tokens=seqs + 31, max_query_len=32, table_width=width)
            steps.run(seqs=seqs, tokens=16 * seqs, max_query_len=16, table_width=width)
    later = len(compiled) - len(kernels)
    return {"kernels": [*map(measure_once, kernels)], "later": later, "layer_launches": layer_launches}


def compile_attention(sm: int, heads: int, kv_heads: int, head_dim: int, dtype: str, cache: str) -> dict[str, Any]:
    """Compile the attention kernels in this process; return the fields of a `Report`."""
    from octavo_engine.ops.attention import AttentionBatch, AttentionSpec, LayerKVSpec
    from octavo_engine.ops.cuda_backend import CudaBackend

    compiled = record_compilations(sm)
    kv = LayerKVSpec(num_kv_heads=kv_heads, head_dim=head_dim)
    spec = AttentionSpec(layer_idx=0, num_heads=heads, kv=kv, scale=head_dim**-0.5)
    backend = CudaBackend(
        *([kv], 16, getattr(torch, cache), "meta"), num_programs=400, has_wgmma=sm == 90, has_e4m3=sm >= 89
    )
    backend.allocate(1000)
    batch = AttentionBatch(
        query_start=_ints(4),
        seq_lens=_ints(3),
        block_tables=_ints(3, 33),
        slots=_ints(70),
        max_query_len=30,
        max_seq_len=500,
        num_keys=1500,
    )
    backend.begin_step(batch)
    qkv = torch.empty(70, heads + 2 * kv_heads, head_dim, dtype=getattr(torch, dtype), device="meta")
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
    backend.attend(spec, q, k, v, batch)
    backend.attend_qkv(spec, qkv[:, : heads + kv_heads], v, None, None, batch)
    return {"kernels": [*map(measure_once, compiled.values())], "later": 0, "layer_launches": []}


def compile_groups(sm: int, kind: str, group: int, dtype: str, scale_dtype: str) -> dict[str, Any]:
    """Compile products with a weight in groups in this process; return the fields of a `Report`."""
    from octavo_engine.ops.triton.group_linear import compile_tiles, group_linear

    from octavo_testing.group_cases import random_group_tensor

    compiled = record_compilations(sm)
    scales, x_dtype = getattr(torch, scale_dtype), getattr(torch, dtype)
    weight = random_group_tensor(kind, 1024, 1024, group, scale_dtype=scales, device="meta")
    bias = torch.empty(1024, dtype=x_dtype, device="meta")
    compile_tiles(weight, bias, x_dtype, x_dtype)
    kernels = list(compiled.values())
    for rows in (1, 2, 16, 17, 63, 64, 65, 128, 256, 257, 2048):
        group_linear(torch.empty(rows, 1024, dtype=x_dtype, device="meta"), weight, bias)
    return {"kernels": [*map(measure_once, kernels)], "later": len(compiled) - len(kernels), "layer_launches": []}


def compile_fp8(sm: int, out: int, size: int, num_groups: int, dtype: str) -> dict[str, Any]:
    """Compile the FP8 kernels in this process; return the fields of a `Report`."""
    from octavo_engine.ops.triton.fp8_linear import TILES, round_rows, scaled_product

    compiled = record_compilations(sm)
    weight = torch.empty((out, size), dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty((num_groups, out), device="meta")

    def multiply(rows: int) -> None:
        x = torch.empty((rows, size), dtype=getattr(torch, dtype), device="meta")
        for bias in (None, torch.empty(out, dtype=x.dtype, device="meta")):
            scaled_product(*round_rows(x, num_groups), weight, scales, bias, x.dtype)

    for tile in TILES:
        multiply(tile.rows)
    kernels = list(compiled.values())
    for rows in (1, 2, 15, 17, 48, 63, 65, 300, 4096):
        multiply(rows)
    later = len(compiled) - len(kernels)
    return {"kernels": [*map(measure_once, kernels)], "later": later, "layer_launches": []}


def main() -> None:
    """Answer each line of stdin, what to compile and the arguments, with the result or, if it fails, with null."""
    from octavo_engine.ops import triton_devices
    from triton.runtime.cache import triton_key

    triton_devices.DEVICES.add("meta")
    triton_key()  # a hash of Triton's own files, which it keeps
    MetaSteps("LlamaForCausalLM", torch.bfloat16)  # imports what all models need
    for line in sys.stdin:
        if os.fork() == 0:
            kind, *arguments = json.loads(line)
            compile_kind = KINDS[kind]
            print(json.dumps(compile_kind(*arguments)), flush=True)
            os._exit(0)
        _, status = os.wait()
        if status:
            print("null", flush=True)


KINDS = {"model": compile_model, "attention": compile_attention, "groups": compile_groups, "fp8": compile_fp8}

if __name__ == "__main__":
    main()
