"""Settings of the HTTP side, resolved and frozen; the engine's own settings are in `octavo_engine.settings.config`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_engine.log_format import LogFormat

from octavo_server.output_parsing.tool_use import ToolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request, each set by the flag of its name."""

    max_request_bytes: int = 4 * 2**20
    max_json_values: int = 400_000
    max_json_depth: int = 128
    max_messages: int = 4096
    max_content_parts: int = 4096
    max_tools: int = 4096
    max_prompts: int = 1024
    max_prompt_chars: int = 2**21
    max_n: int = 256
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_stop_strings_chars: int = 2**14
    max_stop_token_ids: int = 1024
    max_bad_words: int = 1024
    max_bad_words_chars: int = 2**14
    max_logit_bias: int = 4096
    max_allowed_token_ids: int = 2**17
    request_timeout_s: float = 60.0
    min_upload_rate: int = 2**16  # bytes a second


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of the engine's queue; None: no limit. `max_num_queued_reqs` and `max_requests_per_key` count waiting and
    running sequences, `max_num_queued_tokens` the prompt tokens of waiting ones."""

    max_num_queued_reqs: int | None = 8192
    max_num_queued_tokens: int | None = None
    max_requests_per_key: int | None = None
    max_queue_time_s: float | None = None


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
    limits: RequestLimits = field(default_factory=RequestLimits)
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
