"""`octavo serve`: binds the port, starts the engine and serves requests until a signal stops it.

The port is bound before the model is loaded, so that a port in use is reported after a second and not after a minute.
"""

import argparse
import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import uvloop
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.log_format import LogFormat, configure_logging
from octavo_engine.loop.engine_core import freeze_gc
from octavo_engine.process.headless import HeadlessHost
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.sources.hub import set_hub_token
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.records import EngineStats

from octavo_server.access_log import skip_probes
from octavo_server.api.adapter_file import AdapterFileFollower
from octavo_server.cli.declared_flags import from_environment, record_of
from octavo_server.cli.server_checks import (
    check_adapter_file,
    check_keys,
    check_tls,
    check_tools,
    check_usage_log,
    template_warning,
)
from octavo_server.cli.tracers import tracer_of
from octavo_server.cli.vllm_flags import (
    READY_TIMEOUT,
    READY_TIMEOUT_VARIABLE,
    allows_adapter_updates,
    check_server_arguments,
    unused_flags,
    unused_server_variables,
    vllm_arguments,
)
from octavo_server.config import ServerConfig
from octavo_server.http.listener import allow_connections, bind, bound_unix
from octavo_server.http.server import SIGNALS, ProbeServer
from octavo_server.kv.zmq_events import zmq_events
from octavo_server.supervise import cancel_tasks, supervised

if TYPE_CHECKING:
    from octavo_server.tracing import RequestTracer


logger = logging.getLogger("octavo")
STATS_INTERVAL_S = 10.0


def serve(args: argparse.Namespace) -> int:
    configure_logging(args.log_format, process="api")
    skip_probes(args.disable_access_log_for_endpoints)
    engine_config = engine_config_of(args)
    for line in [*unused_flags(args), *unused_server_variables()]:
        logger.warning(line)
    set_hub_token(args.hf_token)
    if args.json and not args.dry_run:
        raise StartupError("--json only sets the format of the report of --dry-run: add --dry-run.")
    if args.dry_run:
        from octavo_server.cli.dry_run import dry_run

        return dry_run(engine_config, args)
    server_config = server_config_of(args, engine_config)
    check_keys(server_config)
    check_adapter_file(server_config, engine_config)
    check_tls(server_config)
    check_usage_log(server_config)
    tracer = tracer_of(server_config)
    server_config = replace(server_config, max_connections=allow_connections(server_config.max_connections))
    with _bound(server_config) as sock:
        if engine_config.headless:
            return _run(_serve_headless(engine_config, server_config, sock))
        return _run(_serve(engine_config, server_config, sock, tracer))


def _bound(config: ServerConfig) -> AbstractContextManager[socket.socket]:
    return bind(config.host, config.port) if config.uds is None else bound_unix(config.uds)


def engine_config_of(args: argparse.Namespace) -> EngineConfig:
    """Engine configuration from the flags. Raises StartupError for an invalid or unsupported value of any flag."""
    check_server_arguments(args)
    settings = {f.name: getattr(args, f.name) for f in fields(EngineConfig)}
    settings["model"] = args.model_tag or args.model
    settings["served_model_name"] = args.served_model_name or settings["model"]
    return resolve_config(**settings, **vllm_arguments(args))


def server_config_of(args: argparse.Namespace, engine: EngineConfig) -> ServerConfig:
    """Settings of the server from the flags. Raises StartupError for an invalid value or combination."""
    config = record_of(
        ServerConfig,
        args,
        served_model_names=engine.served_model_name,
        allows_adapter_updates=allows_adapter_updates(),
    )
    check_tools(config)
    return config


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, sock: socket.socket, tracer: "RequestTracer | None"
) -> int:
    started_s = time.monotonic()
    async with zmq_events(engine_config.kv_events_config) as events:
        importing = asyncio.create_task(asyncio.to_thread(_import_api))
        engine = await _start_unless_stopped(engine_config, config.log_format)
        await importing
        if engine is None:
            return 0
        from octavo_server.api.app import ApiServer, build_app
        from octavo_server.cli.banner import banner

        tasks: list[asyncio.Task[None]] = []
        try:
            if not config.disable_log_stats:
                tasks.append(supervised("logging statistics", lambda: log_stats(lambda: engine.stats)))
            app = build_app(engine, config, tracer)
            server = ApiServer(app, config)
            if config.lora_modules_file is not None:
                follower = AdapterFileFollower(
                    config.lora_modules_file,
                    engine,
                    taken=(*config.served_model_names, *engine.adapters),
                    report=app.state.context.kv.set_adapter_file,
                )
                tasks.append(supervised("following --lora-modules-file", follower.run))
            if events is not None:
                events.attach(engine)
            freeze_gc()
            port = config.port if config.uds is not None else sock.getsockname()[1]
            for line in banner(engine, config, port, time.monotonic() - started_s):
                logger.info(line)
            if warning := template_warning(config.tools.tool_call_parser, engine.frontend.chat_template):
                logger.warning(warning)
            await server.serve(sockets=[sock])
            return 1 if server.engine_died else 0
        finally:
            await cancel_tasks(tasks)
            await engine.shutdown()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)


async def _serve_headless(engine_config: EngineConfig, config: ServerConfig, sock: socket.socket) -> int:
    """Run the ranks of this host, and answer probes, until the engine ends. Raises StartupError with the reason."""
    host = HeadlessHost(engine_config)
    server = ProbeServer(config, is_ready=lambda: host.is_serving, on_stop=host.drain)
    running = asyncio.create_task(asyncio.to_thread(host.run))
    running.add_done_callback(lambda _: server.end())
    try:
        await server.serve(sockets=[sock])
    finally:
        host.end()
        await running
    return 0


def _import_api() -> None:
    """Import FastAPI and all schemas, which takes over a second, while the engine starts in its own process."""
    import octavo_server.api.app  # noqa: F401


async def _start_unless_stopped(config: EngineConfig, log_format: LogFormat) -> AsyncLLM | None:
    """Start the engine and return it; return None if SIGTERM or SIGINT arrived while the model was loading.

    Raises StartupError, also if the engine is not ready within `$VLLM_ENGINE_READY_TIMEOUT_S`.
    """
    timeout_s = from_environment(READY_TIMEOUT)
    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(AsyncLLM.start(config, log_format=log_format))
    for sig in SIGNALS:
        loop.add_signal_handler(sig, starting.cancel)
    try:
        _, late = await asyncio.wait({starting}, timeout=timeout_s)
        if late:
            starting.cancel()
            await asyncio.wait({starting})
            raise StartupError(
                f"the engine was not ready within {timeout_s:g} s: raise ${READY_TIMEOUT_VARIABLE}, or unset it."
            )
        return None if starting.cancelled() else starting.result()
    finally:
        for sig in SIGNALS:
            loop.remove_signal_handler(sig)


async def log_stats(stats: Callable[[], EngineStats], interval_s: float = STATS_INTERVAL_S) -> None:
    """Log load and throughput of each interval in which the engine has taken steps."""
    previous = replace(stats())
    while True:
        await asyncio.sleep(interval_s)
        latest = replace(stats())
        if latest.steps != previous.steps:
            logger.info(describe_stats(previous, latest, interval_s))
        previous = latest


def describe_stats(previous: EngineStats, latest: EngineStats, interval_s: float) -> str:
    prompt_rate = (latest.prompt_tokens - previous.prompt_tokens) / interval_s
    generation_rate = (latest.generation_tokens - previous.generation_tokens) / interval_s
    queries = latest.prefix_cache_queries - previous.prefix_cache_queries
    hits = latest.prefix_cache_hits - previous.prefix_cache_hits
    return (
        f"prompt {prompt_rate:.1f} tokens/s, generation {generation_rate:.1f} tokens/s, running {latest.running}, "
        f"waiting {latest.waiting}, KV cache {latest.kv_usage:.1%}, prefix hits {hits / queries if queries else 0:.1%}"
    )
