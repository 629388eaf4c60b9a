"""Log lines of `octavo serve` when it is ready: model, size of the KV cache, address, and an example request."""

from pathlib import Path
from typing import TYPE_CHECKING

from octavo_server.config import ServerConfig

if TYPE_CHECKING:
    from octavo_engine.frontend.async_llm import AsyncLLM

GIB = 2**30
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_EXAMPLES = {
    CHAT: '"max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]',
    COMPLETIONS: '"max_tokens": 32, "prompt": "Hello"',
    EMBEDDINGS: '"input": "Hello"',
}


def banner(client: "AsyncLLM", config: ServerConfig, port: int, start_s: float) -> list[str]:
    ready, name = client.ready_info, config.model_name
    num_tokens = ready.num_blocks * ready.block_size
    scheme = "http" if config.tls.ssl_certfile is None else "https"
    url = f"{scheme}://localhost" if config.uds else f"{scheme}://{reachable_host(config.host)}:{port}"
    socket = "" if config.uds is None else f" (Unix socket {config.uds})"
    is_plain = (name,) == config.served_model_names == (client.config.model,)
    names = "" if is_plain else f" as {', '.join(config.served_model_names)}"
    route = EMBEDDINGS if client.frontend.model.pooling else CHAT if client.frontend.chat_template else COMPLETIONS
    example = example_command(name, url, route=route, needs_key=config.needs_key, uds=config.uds)
    return [
        f"model {client.config.model}{names}: {ready.dtype} on {ready.device}, {ready.weights_bytes / GIB:.2f} GiB",
        f"KV cache {num_tokens:,} tokens ({ready.kv_bytes / GIB:.2f} GiB, {ready.kv_dtype}): "
        f"room for {num_tokens / ready.max_model_len:.1f} requests of the full {ready.max_model_len:,} tokens at once",
        f"serving at {url}/v1{socket} after {start_s:.1f} s; documentation at {url}/docs",
        *([] if config.has_router_secret else [example]),  # behind a router, requests should go to the router
    ]


def example_command(model: str, url: str, *, route: str = CHAT, needs_key: bool, uds: Path | None = None) -> str:
    """A curl command for a route that the model serves. `uds`: Unix socket of the server."""
    body = f'{{"model": "{model}", {_EXAMPLES[route]}}}'
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    socket = "" if uds is None else f"--unix-socket {uds} "
    return f"try: curl {socket}{url}{route} {key}-H 'Content-Type: application/json' -d '{body}'"


def reachable_host(host: str | None) -> str:
    """Host to put into a URL for clients on this machine, if a server listens on `host`."""
    if host in (None, "", "0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
