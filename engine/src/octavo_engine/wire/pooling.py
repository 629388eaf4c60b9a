"""`PoolingParams`: the settings of a request whose result is one vector instead of text."""

from dataclasses import dataclass

from octavo_engine.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """None means the model's own value. `dimensions`: the vector's first values only, which are then normalised.

    Construction raises InvalidRequest, which names the field.
    """

    dimensions: int | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequest(
                f"dimensions must be an integer of at least 1, got {self.dimensions!r}.", param="dimensions"
            )
        if self.normalize not in (None, False, True):
            raise InvalidRequest(f"normalize must be true or false, got {self.normalize!r}.", param="normalize")
