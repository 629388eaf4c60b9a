"""Models of `spec.adapters`: LoRA adapters of the model, which engines load and unload while they serve."""

from typing import Annotated

from pydantic import Field

from octavo_operator.spec.fields import SpecPart
from octavo_operator.spec.model import URI_PATTERN, claim_name

ADAPTER_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"


class Adapter(SpecPart):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=ADAPTER_NAME_PATTERN)]
    uri: Annotated[str, Field(min_length=7, max_length=1024, pattern=URI_PATTERN)]

    @property
    def claim(self) -> str | None:
        """The PersistentVolumeClaim of a pvc:// adapter."""
        return claim_name(self.uri)


Adapters = Annotated[tuple[Adapter, ...], Field(max_length=32)]
