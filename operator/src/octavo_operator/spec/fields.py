"""Types of the spec's fields, with the bounds of the CRD's schema."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(min_length=1, max_length=253)]
ServiceName = Annotated[str, Field(min_length=1, max_length=40)]
#: A number of bytes in Kubernetes' notation.
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([kKMGTP]i?)?$", max_length=32)]
#: A value that Kubernetes defines and checks, passed through unchanged.
PassedThrough = dict[str, Any]
LabelValue = Annotated[str, Field(max_length=63)]
Annotation = Annotated[str, Field(max_length=4096)]
NodeSelector = Annotated[dict[str, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[str, Annotation], Field(max_length=64)]
Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")]

_SUFFIXES = {"": 1, "k": 10**3} | {
    suffix + binary: (1024 if binary else 1000) ** power
    for power, suffix in enumerate("KMGTP", 1)
    for binary in ("i", "")
}


class SpecPart(BaseModel):
    """Base of all parts of the spec: immutable, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True)


class Reference(SpecPart):
    name: Name


class Resources(SpecPart):
    requests: Annotated[dict[str, int | str], Field(max_length=16)] = Field(default_factory=dict)
    limits: Annotated[dict[str, int | str], Field(max_length=16)] = Field(default_factory=dict)


def num_bytes(quantity: str) -> int:
    """Number of bytes of a `Quantity`."""
    number = quantity.rstrip("kKMGTPi")
    return int(float(number) * _SUFFIXES[quantity[len(number) :]])
