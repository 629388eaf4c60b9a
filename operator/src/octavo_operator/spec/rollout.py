"""Model of `spec.rollout`: how a new revision replaces the old one."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.fields import SpecPart

Seconds = Annotated[int, Field(ge=1, le=604800)]
DEFAULT_PATIENCE_S, DEFAULT_DEADLINE_S = 600, 3600


class Rollout(SpecPart):
    strategy: Literal["Auto", "Surge", "InPlace"] | None = None
    max_surge: Annotated[int, Field(ge=1, le=1000)] | None = None
    surge_patience_seconds: Seconds | None = None
    progress_deadline_seconds: Seconds | None = None
    paused: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.strategy == "InPlace" and self.max_surge is not None:
            raise ValueError("rollout.strategy InPlace starts no replica beyond replicas: leave maxSurge out")
        if self.strategy in ("Surge", "InPlace") and self.surge_patience_seconds is not None:
            raise ValueError(
                "rollout.surgePatienceSeconds is how long strategy Auto waits for room before it goes in place: leave "
                "it out, or choose Auto"
            )
        return self

    @property
    def patience_s(self) -> int:
        return self.surge_patience_seconds or DEFAULT_PATIENCE_S

    @property
    def deadline_s(self) -> int:
        return self.progress_deadline_seconds or DEFAULT_DEADLINE_S
