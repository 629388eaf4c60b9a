"""`CudaDevice`: one NVIDIA GPU by torch and Triton. No other module names `torch.cuda`.

Decisions are pure functions: `describe_problem` takes facts about a machine, and `step_bytes` sizes of a model.
"""

import gc
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo_engine.devices.cgroup import read_limits
from octavo_engine.devices.cuda_calls import EventTimer, GraphCapture, PinnedCopy, PinnedFetch, is_out_of_memory
from octavo_engine.devices.cuda_graphs import MOST_KEYS, Bucket, GraphedSteps, step_buckets
from octavo_engine.devices.dtype import layer_shapes
from octavo_engine.devices.memory import (
    ENGINES_PER_GPU_VARIABLE,
    MIB,
    NUM_ENGINES_VARIABLE,
    MemoryInfo,
    host_memory,
    size,
)
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.devices.transfers import Copy, Fetch, Timer
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.group_tensor import GroupFormat, WeightFormat
from octavo_engine.settings.config import (
    EngineConfig,
    batched_tokens,
    describe_local_ranks,
    describe_ranks,
    most_seqs,
    num_ranks,
    ranks_per_host,
)
from octavo_engine.settings.records import MAX_GPU_LOGITS, ModelConfig
from octavo_engine.sources.model_config import context_length
from octavo_engine.wire.errors import StartupError, first_line

_LOGGER = logging.getLogger(__name__)
UTILIZATION = 0.9
_LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 and asynchronous copies
_FP8_CAPABILITY = (8, 9)  # Ada: conversions and products of e4m3
_LEAST_FREE_BYTES = 512 * MIB
_LIBRARY_BYTES = 512 * MIB  # workspaces of cuBLAS, compiled kernels and fragments of torch's allocator
_LOGIT_COPIES = 3  # logits, copies of them, and the values of the rows that are drawn at a time
_GROUP_BYTES = 1024 * MIB  # buffers of NCCL, and contexts of the processes that use the GPU; an estimate
_OLDER_INDEX, _NEWER_INDEX = (f"https://download.pytorch.org/whl/{cuda}" for cuda in ("cu126", "cu130"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """Facts about the machine's GPU, driver and torch build. `device_error`: why torch finds no GPU; empty if it finds
    one."""

    is_cuda_build: bool = True
    device_error: str = ""
    driver_cuda: tuple[int, int] = (0, 0)  # newest CUDA that the driver supports; 0: unknown
    built_cuda: tuple[int, int] = (0, 0)  # torch's
    capability: tuple[int, int] = _LEAST_CAPABILITY
    architectures: tuple[str, ...] = ()  # of torch's kernels, as torch names them; empty: unknown
    free_bytes: int = 1 << 40
    has_triton: bool = True
    has_compiler: bool = True
    has_python_h: bool = True
    kernel_cache: Path = Path()
    is_cache_writable: bool = True


def describe_problem(facts: CudaFacts) -> str | None:
    """Return cause and remedy, without a full stop, if an engine can't compute with CUDA here; else None."""
    needed, has = (".".join(map(str, capability)) for capability in (_LEAST_CAPABILITY, facts.capability))
    problems = (
        (not facts.is_cuda_build, f"torch {torch.__version__} is built without CUDA: install torch for CUDA"),
        (
            0 < facts.driver_cuda[0] < facts.built_cuda[0],
            f"the NVIDIA driver knows CUDA up to {'.'.join(map(str, facts.driver_cuda))}, but torch is built for "
            f"{'.'.join(map(str, facts.built_cuda))}: update the driver, or install torch for an older CUDA, such as "
            f"TORCH_INDEX={_OLDER_INDEX}",
        ),
        (bool(facts.device_error), f"torch finds no GPU ({facts.device_error}): check the driver with nvidia-smi"),
        (
            facts.capability < _LEAST_CAPABILITY,
            f"the GPU has compute capability {has}, less than {needed}: use a GPU of the Ampere generation or later",
        ),
        (
            not has_kernels(facts.architectures, facts.capability),
            f"torch {torch.__version__} has no kernels for the GPU's compute capability {has}, only for "
            f"{', '.join(facts.architectures)}: install torch for a newer CUDA, such as TORCH_INDEX={_NEWER_INDEX}",
        ),
        (
            facts.free_bytes < _LEAST_FREE_BYTES,
            f"the GPU has {size(facts.free_bytes)} of free memory, less than {size(_LEAST_FREE_BYTES)}: end other "
            "programs on it",
        ),
        (not facts.has_triton, "the Python package triton is not installed: pip install 'octavo-engine[cuda]'"),
        (not facts.has_compiler, "Triton finds no C compiler: install gcc or set CC"),
        (not facts.has_python_h, "Triton's launcher needs Python.h: install Python's headers, such as python3-dev"),
        (
            not facts.is_cache_writable,
            f"Triton can't write compiled kernels to {facts.kernel_cache}: set TRITON_CACHE_DIR to a writable folder",
        ),
    )
    return next((text for is_true, text in problems if is_true), None)


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return True if one of torch's architectures runs on a GPU: "sm_90" on 9.x from 9.0, "compute_90" on all from 9.0.

    Source: CUDA C++ Programming Guide, "Application Compatibility". "sm_90a" runs on 9.0 only.
    """
    for kind, _, number in (name.partition("_") for name in architectures):
        major, minor = divmod(int(number.rstrip("af")), 10)
        is_exact = number.endswith("a")
        if (major, minor) == capability or (kind == "compute" and not is_exact and (major, minor) <= capability):
            return True
        if major == capability[0] and minor <= capability[1] and not is_exact:
            return True
    return not architectures


def find_cuda_problem(index: int = 0) -> str | None:
    """Return why CUDA can't be used on a GPU of this machine, with the remedy; None if it can."""
    if torch.version.cuda is None:
        return describe_problem(CudaFacts(is_cuda_build=False))
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # 12020 for CUDA 12.2; builds without CUDA lack it
    built = tuple(map(int, torch.version.cuda.split(".")[:2]))
    versions = CudaFacts(driver_cuda=(driver // 1000, driver % 1000 // 10), built_cuda=(built[0], built[1]))
    if (problem := describe_problem(versions)) is not None:
        return problem
    try:
        capability, free = torch.cuda.get_device_capability(index), torch.cuda.mem_get_info(index)[0]
    except (RuntimeError, AssertionError) as error:  # no driver, no device, or no memory for a context
        return describe_problem(CudaFacts(device_error=first_line(error).rstrip(".")))
    cache = kernel_cache_folder()
    return describe_problem(
        CudaFacts(
            capability=capability,
            architectures=tuple(torch.cuda.get_arch_list()),
            free_bytes=free,
            has_triton=importlib.util.find_spec("triton") is not None,
            has_compiler=bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")),
            has_python_h=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
            kernel_cache=cache,
            is_cache_writable=is_writable(cache),
        )
    )


def kernel_cache_folder() -> Path:
    """Return Triton's cache folder, by its own rules."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    try:
        home = os.environ.get("TRITON_HOME") or Path.home()
    except RuntimeError:  # the user has none
        home = "~"
    return Path(home) / ".triton" / "cache"


def is_writable(folder: Path) -> bool:
    """Return True if this process may write files to the folder, or create it. A path that it may not see is absent."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.access(path, os.F_OK))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def step_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of the largest step and of graphs, of which no two run at a time.

    It is the sum of: the inputs and outputs of one layer's linears and four hidden states, for each of
    `max_num_batched_tokens` tokens and for each token of the largest graph; the hidden states and inputs of all graphs;
    partial results of attention; block tables of two more steps; three fp32 copies of the logits of `max_num_seqs`
    rows, or of the rows that are computed at a time; counts of penalised tokens; and a constant.
    """
    from octavo_engine.ops.triton.decode_attention import most_parts  # needs Triton, which CPU installations lack

    rows = most_seqs(config)
    buckets = graph_buckets(config)
    tokens, seqs = (max((bucket[i] for bucket in buckets), default=0) for i in range(2))
    values = sum(shape.in_features + shape.out_features for shape in layer_shapes(model)) + 4 * model.hidden_size
    activations = (batched_tokens(config, "cuda") + tokens) * values * dtype.itemsize
    graphs = sum(bucket.num_tokens for bucket in buckets) * model.hidden_size * dtype.itemsize
    partial = most_parts(max(rows, seqs), MOST_KEYS) * model.num_heads * (model.head_dim + 2) * torch.float32.itemsize
    table_width = -(-(config.max_model_len or context_length(model)) // config.block_size) + 1
    in_place = max((sum(bucket.sizes) for bucket in buckets), default=0) + 2 * seqs * table_width
    numbers = (in_place + 2 * rows * table_width) * torch.int32.itemsize
    logits = max(model.vocab_size, min(rows * model.vocab_size, MAX_GPU_LOGITS)) * torch.float32.itemsize
    counts = rows * model.vocab_size * torch.int16.itemsize
    return activations + graphs + numbers + partial + _LOGIT_COPIES * logits + counts + _LIBRARY_BYTES


def graph_buckets(config: EngineConfig) -> list[Bucket]:
    """Return the sizes of the steps that are captured as CUDA graphs."""
    if config.enforce_eager or num_ranks(config) > 1:
        return []
    return step_buckets(config.cudagraph_capture_sizes, most_seqs(config), batched_tokens(config, "cuda"))


def is_cuda_failure(error: Exception) -> bool:
    """Return True for a CUDA error other than memory that ran out: kernels launched after it fail as well."""
    if is_out_of_memory(error):
        return False
    is_cuda_text = isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "[CUDA]" in str(error))
    return isinstance(error, torch.AcceleratorError) or is_cuda_text


def has_fp8(device: torch.device) -> bool:
    """Return True if a device multiplies FP8 numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


class CudaDevice:
    def __init__(self, rank: int = 0) -> None:
        self.name = "cuda"
        self.torch_device = torch.device("cuda", rank)
        self.packs_weights = False
        self.compiles_late = True
        self.group_gpu: torch.device | None = self.torch_device
        self.capture_sizes: tuple[int, ...] = ()
        self._most_tokens = 0  # of a step
        self.num_ranks = 1
        self._input_copy, self._fetch = PinnedCopy(self.torch_device), PinnedFetch()  # each warns once

    def prepare(self, config: EngineConfig) -> None:
        self.capture_sizes, self.num_ranks = config.cudagraph_capture_sizes, num_ranks(config)
        self._most_tokens = batched_tokens(config, self.name)
        torch.cuda.set_device(self.torch_device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)

    def default_dtype(self, model: ModelConfig) -> torch.dtype:
        return torch.float16 if model.dtype == "float16" else torch.bfloat16

    def keeps(self, weight_format: WeightFormat, dtype: torch.dtype) -> bool:
        if not isinstance(weight_format, GroupFormat) or dtype.itemsize != 2:
            return False
        return not weight_format.rounds_inputs or has_fp8(self.torch_device)

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        from octavo_engine.ops.cuda_backend import CudaBackend  # needs Triton, which CPU installations lack
        from octavo_engine.ops.triton.decode_attention import Processor

        gpu = torch.cuda.get_device_properties(self.torch_device)
        return CudaBackend(
            *(specs, block_size, dtype, self.torch_device),
            num_programs=gpu.multi_processor_count,
            processor=Processor(gpu.shared_memory_per_multiprocessor, gpu.max_threads_per_multi_processor),
            has_wgmma=gpu.major == 9,
            has_e4m3=(gpu.major, gpu.minor) >= _FP8_CAPABILITY,
            copy=self._input_copy,
        )

    def check_ranks(self, config: EngineConfig, num_threads: int) -> None:
        num_ranks = ranks_per_host(config)
        num_gpus = torch.cuda.device_count()
        if num_gpus < num_ranks:
            raise StartupError(
                f"{describe_ranks(config)} needs a GPU for each rank{describe_local_ranks(config)}, but {num_gpus} "
                f"{'is' if num_gpus == 1 else 'are'} visible (CUDA_VISIBLE_DEVICES): use at most "
                f"{num_gpus * config.nnodes}, or --device cpu."
            )
        if not torch.distributed.is_nccl_available():
            raise StartupError(f"{describe_ranks(config)} needs torch with NCCL on GPUs: use 1.")

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        """Read the memory of the GPUs; on those of other ranks, this process needs some hundred MiB from then on.

        Memory that an earlier engine of this process has left is free.
        """
        self.release_unused_memory()
        first = self.torch_device.index
        figures = [torch.cuda.mem_get_info(index) for index in range(first, first + num_ranks)]
        return MemoryInfo(
            total_bytes=min(total for _, total in figures),
            available_bytes=min(free for free, _ in figures),
            num_engines=int(os.environ.get(ENGINES_PER_GPU_VARIABLE) or os.environ.get(NUM_ENGINES_VARIABLE, "1")),
            utilization=UTILIZATION,
            host_available_bytes=host_memory(read_limits()).available_bytes // num_ranks,
        )

    def reserve_bytes(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
        return step_bytes(config, model, dtype) + (_GROUP_BYTES if config.tensor_parallel_size > 1 else 0)

    def kv_space_bytes(self) -> int | None:
        """Return None: the variables that set it are for CPUs."""

    def host_blocks(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        """Allocate pinned memory, or pageable memory where the system refuses it, which is slower to copy."""
        try:
            return torch.zeros((num_blocks, bytes_per_block), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOGGER.warning("swap space is not pinned, so swapping is slower: %s", first_line(error))
            return torch.zeros((num_blocks, bytes_per_block), dtype=torch.uint8)

    def input_copy(self) -> Copy:
        return self._input_copy

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> GraphedSteps | None:
        if model.waiting_operator is not None:
            _LOGGER.info("steps run without CUDA graphs: the host waits for results of %s", model.waiting_operator)
            return None
        if self.num_ranks > 1:
            _LOGGER.info("steps run without CUDA graphs: they are not supported with several ranks yet")
            return None
        buckets = step_buckets(self.capture_sizes, limits.max_num_seqs, self._most_tokens)
        return GraphedSteps(
            *(model.forward, limits, buckets, GraphCapture(), self.torch_device),
            overwrite=self._input_copy.overwrite,
            free_bytes=lambda: torch.cuda.mem_get_info(self.torch_device)[0],
        )

    def fetch(self) -> Fetch:
        return self._fetch

    def timer(self) -> Timer:
        return EventTimer()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_unused_memory(self) -> None:
        gc.collect()  # graphs and the closures that they call hold each other
        torch.cuda.empty_cache()

    def is_lost(self, error: Exception) -> bool:
        return is_cuda_failure(error)
