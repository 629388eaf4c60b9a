"""`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`: administrators change a running engine's adapters, as in vLLM.

An adapter that cannot be loaded, or whose client leaves meanwhile, changes nothing. With `--lora-modules-file`, the
file alone decides.
"""

import logging
from functools import partial

from fastapi import APIRouter
from octavo_engine.settings.lora import check_adapter_name
from octavo_engine.wire.errors import ModelNotFound, StartupError
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import TEXT, accepts
from octavo_server.api.request_parsing import parse_body, read_body
from octavo_server.http.responses import CancellableTextResponse
from octavo_server.openai.errors import AdapterNotFound, InvalidAdapterCall, NotEnabled

logger = logging.getLogger(__name__)
router = APIRouter()


class LoadAdapterRequest(BaseModel):
    """`lora_path`: a folder of the engine's machine, or a location from which it is downloaded. `load_inplace`: an
    adapter of this name may be replaced.
    """

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    lora_name: str = ""


@router.post("/v1/load_lora_adapter", **accepts(LoadAdapterRequest, "Load an adapter", answer=TEXT))
async def load_lora_adapter(request: Request) -> Response:
    context = _context_with_updates(request)
    body, _ = await read_body(request, partial(parse_body, context, LoadAdapterRequest))
    name = body.lora_name
    if not name or not body.lora_path:
        raise InvalidAdapterCall("Both 'lora_name' and 'lora_path' must be provided.")
    try:
        check_adapter_name(name, context.config.served_model_names)
    except StartupError as error:
        raise InvalidAdapterCall(str(error), param="lora_name") from None

    async def load() -> bytes:
        await context.client.load_adapter(name, body.lora_path, in_place=body.load_inplace)
        logger.info("adapter %r is loaded from %s", name, body.lora_path)
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    return CancellableTextResponse(context.in_flight, request.scope["state"]["request_id"], load)


@router.post("/v1/unload_lora_adapter", **accepts(UnloadAdapterRequest, "Unload an adapter", answer=TEXT))
async def unload_lora_adapter(request: Request) -> Response:
    """New requests for the adapter get 404 at once; running ones finish."""
    context = _context_with_updates(request)
    body, _ = await read_body(request, partial(parse_body, context, UnloadAdapterRequest))
    name = body.lora_name
    if not name:
        raise InvalidAdapterCall("'lora_name' needs to be provided to unload a LoRA adapter.")

    async def unload() -> bytes:
        try:
            await context.client.unload_adapter(name)
        except ModelNotFound:
            raise AdapterNotFound(name) from None
        logger.info("adapter %r is unloaded", name)
        return f"Success: LoRA adapter '{name}' removed successfully.".encode()

    return CancellableTextResponse(context.in_flight, request.scope["state"]["request_id"], unload)


def _context_with_updates(request: Request) -> ApiContext:
    context = context_of(request)
    if (path := context.config.lora_modules_file) is not None:
        raise InvalidAdapterCall(f"the adapters are those of --lora-modules-file {path}: change that file.")
    if not context.client.config.enable_lora or not context.config.allows_adapter_updates:
        raise NotEnabled(request.url.path, "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    return context
