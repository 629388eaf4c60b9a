"""`Entries`: the lists of request models, and `PIECES`: which of them are validated entry by entry."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, Field

Entry = TypeVar("Entry")
#: A list that reports its first wrong entry alone: pydantic would make an error of some hundred bytes for each.
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class InPieces(BaseModel):
    """`PIECES`: field -> the model of its entries. `parse_request` validates each of them apart."""

    PIECES: ClassVar[dict[str, type[BaseModel]]] = {}
