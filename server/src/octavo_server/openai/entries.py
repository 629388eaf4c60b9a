"""`Entries`: the list type of request models; `ENTRY_MODELS`: fields whose lists are validated entry by entry."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, Field

Entry = TypeVar("Entry")
#: A list of which only the first wrong entry is reported: pydantic would build an error of some hundred bytes for each.
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class ValidatedByEntry(BaseModel):
    """A body with large lists. `ENTRY_MODELS`: list field -> model of its entries, each validated on its own."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {}
