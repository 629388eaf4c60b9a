"""`Entries`: the lists of request models, and `ENTRY_MODELS`: which of them are validated entry by entry."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, Field

Entry = TypeVar("Entry")
#: A list that reports its first wrong entry alone: pydantic would make an error of some hundred bytes for each.
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class ValidatedByEntry(BaseModel):
    """`ENTRY_MODELS`: field -> the model of its entries. `parse_request` validates each of them apart."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {}
