"""`PoolingParams`: the settings of a request whose result is one vector instead of text."""

from dataclasses import dataclass

from octavo_engine.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """None means the model's own value. `dimensions`: the vector's first values only, which are then normalised.

    None means the model's own value. `dimensions`: cut the vector to this length, and normalise it again.
    `use_activation`: scale it to length 1; `normalize` is its older name. Construction raises InvalidRequest with the
    field.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequest(
                f"dimensions must be an integer of at least 1, got {self.dimensions!r}.", param="dimensions"
            )
        for name in ("normalize", "use_activation"):
            if (value := getattr(self, name)) not in (None, False, True):
                raise InvalidRequest(f"{name} must be true or false, got {value!r}.", param=name)
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest(
                f"use_activation={self.use_activation} and its older name normalize={self.normalize} differ: set one.",
                param="use_activation",
            )
