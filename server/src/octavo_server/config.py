"""Settings of the HTTP side, resolved and frozen; the engine's own settings are in `octavo_engine.settings.config`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_engine.log_format import LogFormat
from octavo_engine.settings.arg_types import seconds, size_or_auto
from octavo_engine.settings.declare import setting

from octavo_server.output_parsing.tool_use import ToolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of one request that the router checks, too."""

    max_request_bytes: int = setting(
        4 * 2**20,
        "Largest number of bytes of a request body; accepts 32M.",
        group="limits of one request",
    )
    max_json_values: int = setting(
        400_000,
        "Largest number of JSON values (numbers, strings, lists, objects) in a request body, and of sequences times "
        "entries and characters in stop, bad_words, logit_bias and other lists.",
    )
    max_json_depth: int = setting(128, "Largest number of nested JSON levels in a request body.")
    request_timeout: float = setting(
        60.0,
        "Seconds that a client has to send the body of a request; for its headers the same time, at most 10 s.",
        parse=seconds,
    )
    min_upload_rate: int = setting(
        2**16,
        "Bytes a second; a request whose body arrives more slowly for 5 s gets status 408; 0: no limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(BodyLimits):
    """Limits of one request."""

    max_messages: int = setting(4096, "Largest number of messages of a chat request.", group="limits of one request")
    max_content_parts: int = setting(
        4096, "Largest number of content parts of all messages of a chat request together."
    )
    max_tools: int = setting(4096, "Largest number of tools of a request.")
    max_prompts: int = setting(
        1024, "Largest number of prompts of a completion request, or of documents of a rerank request."
    )
    max_prompt_chars: int = setting(
        2**21, "Largest number of characters of a text to tokenise, independent of the context length."
    )
    max_n: int = setting(256, "Largest n, the number of sequences per prompt.")
    max_stop_strings: int = setting(64, "Largest number of stop strings of a request.")
    max_stop_chars: int = setting(1024, "Largest number of characters of a stop string or bad word.")
    max_stop_strings_chars: int = setting(
        2**14, "Largest number of characters of all stop strings of a request together."
    )
    max_stop_token_ids: int = setting(1024, "Largest number of entries of stop_token_ids.")
    max_bad_words: int = setting(1024, "Largest number of entries of bad_words.")
    max_bad_words_chars: int = setting(2**14, "Largest number of characters of all bad words of a request together.")
    max_logit_bias: int = setting(4096, "Largest number of entries of logit_bias.")
    max_allowed_token_ids: int = setting(2**17, "Largest number of entries of allowed_token_ids.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of the engine's queue; None: no limit."""

    max_num_queued_reqs: int | None = setting(
        8192,
        "Largest number of waiting and running sequences of all requests together; -1: no limit.",
        group="queue: A request beyond these limits gets status 429 with Retry-After.",
        parse=size_or_auto,
    )
    max_num_queued_tokens: int | None = setting(
        None,
        "Number of prompt tokens of waiting requests from which on new requests are rejected.",
        parse=size_or_auto,
    )
    max_requests_per_key: int | None = setting(
        None,
        "Number of one API key's waiting and running sequences from which on its new requests are rejected.",
        parse=size_or_auto,
    )
    max_queue_time: float | None = setting(
        None, "Seconds after which a request that still waits in the queue gets status 503.", parse=seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings that the engine's server and the router share."""

    host: str | None = None
    port: int = 8000
    uvicorn_log_level: str = "info"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_files: tuple[Path, ...] = ()
    router_secrets: tuple[str, ...] = field(default=(), repr=False)
    router_secret_file: Path | None = None
    limits: BodyLimits = field(default_factory=BodyLimits)
    max_body_memory_bytes: int = 256 * 2**20
    log_format: LogFormat = "text"
    logs_access: bool = True
    drain_timeout_s: float = 30.0
    shutdown_delay_s: float = 0.0
    keep_alive_s: int = 120
    slow_client_timeout_s: float = 60.0
    max_connections: int = 4096
    otlp_traces_endpoint: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # for CORS
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    @property
    def needs_key(self) -> bool:
        return bool(self.api_keys or self.api_key_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Files of the server's certificate, and of the authorities that sign clients' certificates. None: no TLS."""

    certfile: Path | None = None
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0  # of Python's `ssl`: 0 ignores clients' certificates, 2 requires them
    ciphers: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(HttpSettings):
    served_model_names: tuple[str, ...]
    limits: RequestLimits = field(default_factory=RequestLimits)
    uds: Path | None = None  # a Unix socket to listen on, instead of host and port
    tls: TlsSettings = field(default_factory=TlsSettings)
    root_path: str = ""
    router_only: bool = False
    cache_isolation: bool = False
    queue: QueueLimits = field(default_factory=QueueLimits)
    response_role: str = "assistant"
    enable_force_include_usage: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    enable_tokenizer_info_endpoint: bool = False
    max_log_len: int | None = None
    unlogged_paths: tuple[str, ...] = ()
    stream_interval: int = 1  # tokens per chunk of a stream
    return_tokens_as_token_ids: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False
    reasoning_parser: str | None = None
    tools: ToolSettings = field(default_factory=ToolSettings)
    disable_log_stats: bool = False
    disable_fastapi_docs: bool = False
    metrics_prefix: str = "vllm:"
    enable_per_request_metrics: bool = False
    allows_adapter_updates: bool = False
    lora_modules_file: Path | None = None
    health_stall_timeout_s: float = 60.0

    @property
    def trusts_router(self) -> bool:
        return bool(self.router_secrets or self.router_secret_file)

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
