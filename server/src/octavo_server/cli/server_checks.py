"""Checks of settings that depend on each other or on files, which run before the model is loaded."""

import ssl
from typing import TYPE_CHECKING

from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError

from octavo_server.access_log import UsageLog
from octavo_server.api.adapter_file import read_adapter_file
from octavo_server.config import ServerConfig, TlsSettings
from octavo_server.http.api_keys import ApiKeys
from octavo_server.http.router_secret import router_secrets
from octavo_server.http.tenants_file import TenantsFile
from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS

if TYPE_CHECKING:
    from octavo_engine.text.template import ChatTemplate


def template_warning(parser: str | None, template: "ChatTemplate | None") -> str | None:
    if parser is None or (template is not None and "tools" in (template.tool_source or template.source)):
        return None
    return (
        f"--tool-call-parser {parser}: the chat template does not mention tools, so prompts will not describe them. "
        "Pass a template that mentions them with --chat-template."
    )


def check_tools(config: ServerConfig) -> None:
    """Raises StartupError for an unknown parser, for a missing parser, and for a template value with a reserved
    name."""
    name, reasoning = config.tools.tool_call_parser, config.reasoning_parser
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise StartupError(f"--reasoning-parser {reasoning} is unknown: use one of {', '.join(REASONING_PARSERS)}.")
    if name is not None and name not in TOOL_PARSERS:
        raise StartupError(f"--tool-call-parser {name} is unknown: use one of {', '.join(TOOL_PARSERS)}.")
    if config.tools.enable_auto_tool_choice and name is None:
        raise StartupError(f"--enable-auto-tool-choice needs --tool-call-parser: one of {', '.join(TOOL_PARSERS)}.")
    from octavo_server.openai.rendering import RESERVED_KWARGS

    if taken := sorted(RESERVED_KWARGS & config.default_chat_template_kwargs.keys()):
        raise StartupError(f"--default-chat-template-kwargs can't set {', '.join(taken)}: leave it out.")


def check_usage_log(config: ServerConfig) -> None:
    """Raises StartupError for a file that can't be written."""
    if config.usage_log is not None:
        UsageLog(config.usage_log).close()


def check_tls(config: ServerConfig) -> None:
    """Check files and ciphers. Raises StartupError."""
    tls = config.tls
    if tls.ssl_certfile is None:
        if tls != TlsSettings():
            raise StartupError(
                "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need a certificate: add --ssl-certfile."
            )
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile)
        if tls.ssl_ca_certs is not None:
            context.load_verify_locations(tls.ssl_ca_certs)
        if tls.ssl_ciphers is not None:
            context.set_ciphers(tls.ssl_ciphers)
    except (OSError, ValueError) as error:
        files = ", ".join(
            str(file) for file in (tls.ssl_certfile, tls.ssl_keyfile, tls.ssl_ca_certs) if file is not None
        )
        raise StartupError(
            f"TLS can't start with {files}: {error}. Give PEM files of one certificate and key."
        ) from error


def check_keys(config: ServerConfig) -> None:
    """Check keys, secrets and dependent flags. Raises StartupError."""
    if config.enable_log_outputs and not config.enable_log_requests:
        raise StartupError("--enable-log-outputs needs --enable-log-requests: add it.")
    ApiKeys(config.api_key, config.api_key_file)
    TenantsFile(config.tenants_file)
    router_secrets(config.router_secret, config.router_secret_file)
    if config.router_only and not config.has_router_secret:
        raise StartupError("--router-only needs the router's secret: add --router-secret or --router-secret-file.")
    if config.cache_isolation and not config.needs_key and not config.has_router_secret:
        raise StartupError(
            "--cache-isolation separates tenants by their API keys: add --api-key, --api-key-file or, behind a router "
            "that checks keys, --router-secret."
        )


def check_adapter_file(config: ServerConfig, engine: EngineConfig) -> None:
    """Check the file of adapters. Raises StartupError."""
    if config.lora_modules_file is not None:
        if not engine.enable_lora:
            raise StartupError("--lora-modules-file needs --enable-lora: add it.")
        read_adapter_file(config.lora_modules_file)
