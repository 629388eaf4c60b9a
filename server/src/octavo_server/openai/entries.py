"""`Entries`: the list type of request models; `ENTRY_MODELS`: fields whose lists are validated entry by entry."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, model_validator

Entry = TypeVar("Entry")
#: A list of which only the first wrong entry is reported: pydantic would build an error of some hundred bytes for each.
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class NullIsUnset(BaseModel):
    """A model whose fields may be null, which stands for their defaults."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, sent: Any) -> Any:
        return {name: value for name, value in sent.items() if value is not None} if isinstance(sent, dict) else sent


class ValidatedByEntry(BaseModel):
    """A body with large lists. `ENTRY_MODELS`: list field -> model of its entries, each validated on its own."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {}
