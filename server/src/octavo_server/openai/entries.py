"""`Entries`: the list type of request models; `ENTRY_MODELS`: fields whose lists are validated entry by entry."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, Field

Entry = TypeVar("Entry")
#: A list that reports only its first wrong entry: pydantic would build an error of some hundred bytes for each.
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class ValidatedByEntry(BaseModel):
    """`ENTRY_MODELS`: field -> model of its entries. `parse_request` validates each entry on its own."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {}
