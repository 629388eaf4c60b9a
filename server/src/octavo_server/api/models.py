"""`GET /v1/models` and `GET /v1/models/NAME`, in the form of the API that the client speaks."""

from fastapi import APIRouter
from octavo_engine.wire.errors import ModelNotFound
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from octavo_server.anthropic.answer import VERSION, model_info, model_page
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import answers
from octavo_server.json_responses import json_reply
from octavo_server.openai.models import ModelList, ModelObject, permission

router = APIRouter()


@router.get("/v1/models", **answers("The served names", ModelList, refusals=(401,)))
async def list_models(request: Request) -> Response:
    context = context_of(request)
    names = [*context.config.served_model_names, *context.adapters]
    cards = [_card(context, name) for name in names]
    return json_reply(model_page(cards) if VERSION in request.headers else ModelList(cards))


@router.get("/v1/models/{model:path}", **answers("One served name", ModelObject, refusals=(401, 404)))
async def retrieve_model(request: Request, model: str) -> Response:
    context = context_of(request)
    if not model and request.scope["path"].endswith("/"):  # the route also matches a line break in this place
        return RedirectResponse(request.url.replace(path=request.url.path.removesuffix("/")))
    if model not in context.config.served_model_names and model not in context.adapters:
        raise ModelNotFound(model)
    card = _card(context, model)
    return json_reply(model_info(card) if VERSION in request.headers else card)


def _card(context: ApiContext, name: str) -> ModelObject:
    client = context.client
    adapter = context.adapters.get(name)
    return ModelObject(
        name,
        context.created,
        root=client.config.model if adapter is None else adapter.path,
        parent=None if adapter is None else adapter.parent or context.config.model_name,
        max_model_len=client.frontend.max_model_len,
        permission=[permission(name, context.created)],
    )
