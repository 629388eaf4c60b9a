"""The model object of `/v1/models`, with vLLM's extra fields."""

from typing import Any

from msgspec import Struct, field


class ModelObject(Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None  # None if unknown
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None
    permission: list[dict[str, Any]] = field(default_factory=list)


class ModelList(Struct):
    data: list[ModelObject]
    object: str = "list"


def permission(model: str, created: int) -> dict[str, Any]:
    """The permission object that OpenAI's older clients expect, with the actions that this server allows."""
    allowed = ("allow_sampling", "allow_logprobs", "allow_view")
    refused = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
    card: dict[str, Any] = {"id": f"modelperm-{model}", "object": "model_permission", "created": created}
    return card | dict.fromkeys(allowed, True) | dict.fromkeys(refused, False) | {"organization": "*", "group": None}
