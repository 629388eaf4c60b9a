"""Settings of the HTTP side, resolved and frozen; the engine's own settings are in `octavo_engine.settings.config`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo_engine.log_format import LogFormat
from octavo_engine.settings.arg_types import (
    MAX_PORT,
    comma_list,
    metrics_prefix,
    seconds,
    size_or_auto,
    whole_seconds,
)
from octavo_engine.settings.declare import Declared, setting

from octavo_server.http.cors import CorsPolicy
from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS
from octavo_server.output_parsing.tool_use import ToolSettings

SECRET_VARIABLE = "OCTAVO_ROUTER_SECRET"
ADMIN_SECRET_VARIABLE = "OCTAVO_ADMIN_SECRET"
#: Defaults of `--max-request-bytes`, for a model that takes images and for one that takes only text.
IMAGES_BYTES, TEXT_BYTES = 32 * 2**20, 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits(Declared):
    """Limits of one request that the router checks, too."""

    max_request_bytes: int | None = setting(
        None,
        "Largest number of bytes of a request body; accepts 32M.",
        group="limits of one request",
        parse=size_or_auto,
        unset="32M, but 4M at a server whose model takes only text",
    )
    max_json_values: int = setting(
        400_000,
        "Largest number of JSON values (numbers, strings, lists, objects) in a request body; also limits the number "
        "of sequences times the entries and characters of stop, bad_words, logit_bias and other lists.",
    )
    max_json_depth: int = setting(128, "Largest number of nested JSON levels in a request body.")
    request_timeout: float = setting(
        60.0,
        "Seconds that a client has to send the body of a request; its headers have the same time, but at most 10 s.",
        parse=seconds,
    )
    min_upload_rate: int = setting(
        2**16, "Bytes per second of a body; a request whose body is slower for 5 s gets status 408; 0: no limit."
    )

    @property
    def body_bytes(self) -> int:
        """Largest number of bytes of a body; by default, those of a photo or two."""
        return IMAGES_BYTES if self.max_request_bytes is None else self.max_request_bytes


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
class QueueLimits(Declared):
    """Limits of the engine's queue; None: no limit."""

    max_num_queued_reqs: int | None = setting(
        8192,
        "Largest number of waiting and running sequences of all requests together; -1: no limit.",
        group="queue: A request beyond these limits gets status 429 with Retry-After.",
        parse=size_or_auto,
    )
    max_num_queued_tokens: int | None = setting(
        None, "Number of prompt tokens of waiting requests at which new requests are rejected.", parse=size_or_auto
    )
    max_requests_per_key: int | None = setting(
        None,
        "Number of one API key's waiting and running sequences at which its new requests are rejected.",
        parse=size_or_auto,
    )
    max_queue_time: float | None = setting(
        None, "Seconds after which a request that still waits in the queue gets status 503.", parse=seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(Declared):
    """Settings that the engine's server and the router share."""

    host: str | None = setting(
        None, "Address to listen on.", group="server", unset="all addresses of this machine", metavar=None
    )
    port: int = setting(8000, "Port to listen on; 0: any free port.", ge=0, le=MAX_PORT, metavar=None)
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = setting(
        "info", "Lowest level of uvicorn's messages that are logged."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names under which clients may call a server without API keys, besides IP addresses, localhost and the name of "
        "this machine; *: all names.",
        metavar="NAME",
    )
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    log_format: LogFormat = setting("text", "Format of log lines.", group="observability")
    disable_uvicorn_access_log: bool = setting(
        False, "Omit the log line per HTTP request; probes and scrapes are never logged."
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector that gets traces of requests (OTLP over HTTP), such as "
        "http://collector:4318/v1/traces.",
        metavar="URL",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "API keys; each request must have one of them, admin routes the key named `admin` from --api-key-file.",
        group="API keys",
        env=("OCTAVO_API_KEY", "VLLM_API_KEY"),
        unset="no key is required",
        metavar="KEY",
        repeats=True,
        secret=True,
    )
    api_key_file: tuple[Path, ...] = setting(
        tuple,
        "Named API keys: a file of `name: key` lines, or a folder with one file per key, as Kubernetes mounts a "
        "Secret; reloaded when it changes.",
        metavar="FILE",
        repeats=True,
    )
    router_secret: tuple[str, ...] = setting(
        (),
        "Secret that a router sends to its replicas, so that they accept its requests and tenants; several secrets "
        "during a rotation.",
        env=(SECRET_VARIABLE,),
        unset="replicas trust no router",
        metavar="SECRET",
        secret=True,
    )
    router_secret_file: Path | None = setting(
        None,
        "File with a secret per line, or folder with a secret per file, instead of --router-secret; reloaded when it "
        "changes. Replicas accept each secret, a router sends the first.",
    )
    tenants_file: Path | None = setting(
        None,
        "YAML file with the weight and the limits of each API key, by the key's name; reloaded when it changes.",
        metavar="FILE",
    )
    limits: BodyLimits = field(default_factory=BodyLimits)
    max_body_memory: int = setting(
        256 * 2**20,
        "Largest number of bytes of all request bodies in memory, and of answers that are not streamed; a request "
        "beyond it gets status 503.",
        group="limits of one request",
    )
    keep_alive_timeout: int = setting(
        120,
        "Seconds that a connection stays open without a request; should exceed the idle timeout of proxies in front.",
        group="connections",
        parse=whole_seconds,
        env=("VLLM_HTTP_TIMEOUT_KEEP_ALIVE",),
    )
    slow_client_timeout: float = setting(
        60.0, "Seconds after which a client that has stopped reading its response is disconnected.", parse=seconds
    )
    max_connections: int = setting(
        4096,
        "Largest number of connections of a process; a further one closes the connection that has been without a "
        "request for longest. Connections with a request in progress stay open.",
        ge=1,
    )
    drain_timeout: float = setting(
        30.0,
        "Seconds that running requests have to finish after SIGTERM or POST /drain.",
        group="shutdown",
        parse=seconds,
        flags=("--shutdown-timeout",),
    )
    shutdown_delay: float = setting(
        0.0,
        "Smallest number of seconds between SIGTERM and exit, so that proxies notice the end. Meanwhile a router "
        "serves new requests, and `octavo serve` answers them with status 503. Ctrl-C skips this delay.",
        parse=seconds,
    )

    @property
    def needs_key(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    @property
    def has_router_secret(self) -> bool:
        return bool(self.router_secret or self.router_secret_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings(Declared):
    """Files of the server's certificate, and of the authorities that sign clients' certificates. None: no TLS."""

    ssl_certfile: Path | None = setting(None, "Certificate of the server (PEM); turns on HTTPS.", group="server")
    ssl_keyfile: Path | None = setting(None, "Private key of --ssl-certfile, if that file lacks it.")
    ssl_ca_certs: Path | None = setting(None, "Certificates of the authorities that sign clients' certificates.")
    ssl_cert_reqs: Literal[0, 1, 2] = setting(0, "Clients' certificates: 0: ignored, 1: optional, 2: required.")
    ssl_ciphers: str | None = setting(None, "Ciphers of TLS 1.2, in OpenSSL's form.", unset="Python's")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(HttpSettings):
    """Settings of the engine's server. `allows_adapter_updates`: by a variable of vLLM."""

    served_model_names: tuple[str, ...]
    allows_adapter_updates: bool = False
    limits: RequestLimits = field(default_factory=RequestLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tools: ToolSettings = field(default_factory=ToolSettings)
    uds: Path | None = setting(None, "Unix socket to listen on, instead of --host and --port.", group="server")
    root_path: str = setting("", "Path prefix that a proxy removes from requests, for links.", metavar=None)
    response_role: str = setting("assistant", "Role of messages in chat responses.", metavar=None)
    enable_force_include_usage: bool = setting(False, "Token counts at the end of every stream, even if not requested.")
    stream_interval: int = setting(1, "Tokens per chunk of a stream; the first token is sent at once.", ge=1)
    return_tokens_as_token_ids: bool = setting(False, "Tokens of log-probabilities written as token_id:123.")
    enable_log_requests: bool = setting(False, "Log line with prompt and sampling parameters for each request.")
    enable_log_outputs: bool = setting(False, "Log line with each output; needs --enable-log-requests.")
    max_log_len: int | None = setting(
        None,
        "Number of characters to which the log cuts a prompt or an output.",
        unset="no limit",
        parse=int,
        metavar=None,
    )
    disable_log_stats: bool = setting(False, "Omit the log line about load and throughput every 10 s.")
    disable_fastapi_docs: bool = setting(False, "Omit the routes /docs and /openapi.json.")
    lora_modules_file: Path | None = setting(
        None,
        "YAML or JSON list of adapters, each with name and uri, read again when it changes: adapters are loaded, "
        "replaced and unloaded while requests run. Needs --enable-lora.",
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "The tokenizer's settings and chat template at /tokenizer_info."
    )
    health_stall_timeout: float = setting(
        60.0,
        "Seconds without progress on unfinished requests after which /health returns 503; 0: never.",
        group="observability",
        parse=seconds,
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (), "Paths without log line, such as /v1/models,/tokenize.", parse=comma_list
    )
    usage_log: str | None = setting(
        None,
        "File to which the server appends a line of JSON at the end of each request: its tenant, tokens and times; -: "
        "standard output.",
        metavar="FILE",
    )
    metrics_prefix: str = setting(
        "vllm:", "Prefix of the names of the metrics that vLLM also has.", parse=metrics_prefix, unset="'vllm:'"
    )
    enable_per_request_metrics: bool = setting(False, "Field `metrics` of responses, with the times of the request.")
    cache_isolation: bool = setting(
        False,
        "Separate prefix cache for each API key, so that no client can find out by timing which prompts another key "
        "has sent.",
        group="API keys",
    )
    router_only: bool = setting(False, "Reject every request without the router's secret, except probes and /metrics.")
    exclude_tools_when_tool_choice_none: bool = setting(
        False,
        'No description of tools in the prompt of a request with tool_choice "none".',
        group="tools and reasoning",
    )
    trust_request_chat_template: bool = setting(
        False, "Render a conversation with the chat_template of its request.", unset="refuse such a request"
    )
    default_chat_template_kwargs: dict[str, Any] = setting(
        {},
        'Values for the chat template, such as {"enable_thinking": false}; values in a request replace them.',
    )
    reasoning_parser: str | None = setting(
        None,
        f"Format of the model's reasoning: {', '.join(REASONING_PARSERS)}.",
        convert=lambda name: name or None,
        metavar="NAME",
    )

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
