"""Types of the spec's fields, with the bounds of the CRD's schema."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from octavo_operator.spec.quantity import QUANTITY_PATTERN, parse_quantity

MAX_AMOUNT_CHARS = 32
SHARE_PATTERN = "^(100|[0-9]{1,2})%$"
Name = Annotated[str, Field(min_length=1, max_length=253)]
ServiceName = Annotated[str, Field(min_length=1, max_length=40)]
#: A number of bytes in Kubernetes' notation.
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?$", max_length=32)]

#: A value that Kubernetes defines and checks, passed through unchanged.
PassedThrough = dict[str, Any]
LabelValue = Annotated[str, Field(max_length=63)]
Annotation = Annotated[str, Field(max_length=4096)]
NodeSelector = Annotated[dict[str, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[str, Annotation], Field(max_length=64)]
Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")]


def _check_share(value: int | str) -> int | str:
    if not re.match(SHARE_PATTERN, value) if isinstance(value, str) else value < 0:
        raise ValueError("this is neither a number of pods nor a percentage: write it like 1 or 25%")
    return value


#: A number of pods, or a percentage of all.
Share = Annotated[int | str, AfterValidator(_check_share)]


def _check_amount(value: int | str) -> int | str:
    if not re.match(QUANTITY_PATTERN, str(value)) or len(str(value)) > MAX_AMOUNT_CHARS:
        raise ValueError("this is no quantity of Kubernetes: write it like 500m, 2 or 16Gi")
    return value


#: A quantity of any resource.
Amount = Annotated[int | str, AfterValidator(_check_amount)]


class SpecPart(BaseModel):
    """Base of all parts of the spec: immutable, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True)


class Reference(SpecPart):
    name: Name


class Resources(SpecPart):
    requests: Annotated[dict[str, Amount], Field(max_length=16)] = Field(default_factory=dict)
    limits: Annotated[dict[str, Amount], Field(max_length=16)] = Field(default_factory=dict)


def num_of_share(share: int | str, total: int) -> int:
    """Number of pods for a `Share` of `total`: a percentage is rounded up, as Kubernetes does for unavailable pods."""
    return share if isinstance(share, int) else -(-int(share.rstrip("%")) * total // 100)


def num_bytes(quantity: str) -> int:
    """Number of bytes of a `Quantity`."""
    return int(parse_quantity(quantity) or 0)
