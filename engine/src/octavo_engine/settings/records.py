"""Frozen records that processes exchange, free of torch, and the values of single settings.

`ModelConfig` comes from the checkpoint (its `config.json`, or the same keys made from GGUF metadata).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from octavo_engine.settings.declare import Declared, setting

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "octavo", "transformers"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]
Quantization = Literal["gguf", "gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "int8", "int4"]
ContentFormatName = Literal["auto", "string", "openai"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
PreemptionMode = Literal["auto", "swap", "recompute"]
SchedulingPolicy = Literal["fcfs", "priority"]
Runner = Literal["auto", "generate", "pooling"]
PoolingType = Literal["LAST", "CLS", "MEAN"]  # a prompt's last hidden row, its first, or their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPooling:
    """Rule by which an embedding model makes a vector from hidden rows.

    `matryoshka_dimensions`: the lengths to which a vector may be cut; empty: any, if `is_matryoshka`.
    """

    kind: PoolingType = "LAST"
    normalize: bool = True
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Settings of the vision tower. `family`: `model_type` in `config.json`, such as "smolvlm". `hf`: content of that
    file. `most_tokens`: most tokens of an image; 0 if the checkpoint has no settings of an image processor: the model
    then takes no images.
    """

    family: str
    image_token_id: int
    hf: dict[str, Any]
    most_tokens: int = 0


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
    dtype: str  # the checkpoint's: "float32" | "float16" | "bfloat16"
    hf: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    name: str = "model"
    pooling: ModelPooling | None = None  # None: the model generates tokens; else it has no head
    vision: VisionConfig | None = None  # None: the model takes no images


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
    max_step_ms: float = 0.0  # limit of a step with prompt tokens beside other requests; 0: none
    watermark: float = 0.0
    max_loras: int = 0  # different adapters in a step; 0: no limit
    preemption_mode: PreemptionMode = "auto"
    block_lives_every: int = 0  # one of this many block allocations is sampled; 0: none is
    hash_root: bytes = b""  # `wire.hashing.root_hash` without salt and adapter
    debug_invariants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Declared):
    """Value of `--kv-events-config`. The publisher binds endpoints with `*`, `::` or `ipc:`, and connects to others.

    `max_queue_size` has no effect: events go straight to ZeroMQ's own queue.
    """

    enable_kv_cache_events: bool = setting(False, "Publication of events.")
    publisher: Literal["zmq", "null"] | None = setting(None, "Way of publication.", unset="zmq")
    endpoint: str = setting("tcp://*:5557", "Address of the publisher.")
    replay_endpoint: str | None = setting(None, "Address at which subscribers ask for past events.")
    buffer_steps: int = setting(10_000, "Number of past batches of events that are kept.", ge=0)
    hwm: int = setting(100_000, "Number of batches that wait for a slow subscriber.", ge=0)
    max_queue_size: int = setting(100_000, "No effect.")
    topic: str = setting("", "First part of each message.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Value of `--speculative-config`.

    Method "ngram" looks for matches of `prompt_lookup_min` to `prompt_lookup_max` tokens. With "draft_model", `model`
    makes the drafts (`revision`: its commit or branch).
    """

    num_speculative_tokens: int
    method: Literal["ngram", "draft_model"] = "ngram"
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    model: str | None = None
    revision: str | None = None


MAX_GRAPH_ROWS = 1024  # most rows of a decode step that runs as a CUDA graph
MAX_GRAMMAR_BYTES = 1 << 18  # most bytes of a schema, regex or grammar: the compiler's stack grows with them
MAX_LOGITS = 16 << 20  # most fp32 logits in memory at a time on a CPU
MAX_GPU_LOGITS = 64 << 20  # on a GPU, which reads the model's head again for each part of a step's rows
SMALLER_DEFAULT_SEQS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAModule:
    """An adapter that is loaded at the start. `path`: folder of a PEFT checkpoint. `base_model_name`: the parent that
    the API shows; None: the first served name.
    """

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig(Declared):
    """Value of `--pooler-config`. None: as the model's files say."""

    pooling_type: PoolingType | None = setting(
        None, "Hidden rows of a prompt that make its vector.", convert=lambda kind: kind and kind.upper()
    )
    use_activation: bool | None = setting(None, "Vectors of length 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInfo:
    """Facts that the engine core reports once the model is loaded and the KV cache is sized.

    `startup_s`: seconds of each start phase: imports (`import`), compilation (`compile`), loading the model
    (`weights`). `adapters`: content hashes of `lora_modules`, by name. `adapter_folders`: their folders on this
    machine. `max_num_seqs`: the user's value, or the device's default.
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
    adapter_folders: dict[str, str] = field(default_factory=dict)
    max_num_seqs: int = SMALLER_DEFAULT_SEQS
    revision: str = ""  # commit on a hub, or digest of a bucket's list of files; "" for local files
