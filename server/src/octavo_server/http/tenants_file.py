"""`TenantsFile`: the weight and the limits of each tenant, from a YAML file that is read again when it changes.

A tenant is the name of an API key. A tenant without a value in the file gets that of `default`. If the file becomes
invalid while the server runs, the error is logged once, and the limits stay as they are.
"""

import logging
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Annotated, Any

import yaml
from octavo_engine.wire.errors import StartupError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from octavo_server.http.api_keys import FileWatch, read_watched

logger = logging.getLogger(__name__)

FLAG = "--tenants-file"
#: Replaces messages of pydantic that name classes of this module.
NO_MAPPING = "Input should be a mapping of fields to values"
Limit = Annotated[int, Field(ge=1, le=10**9)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)


class TenantLimits(_Part):
    """Limits of a tenant. `weight`: for its share of an engine. None: no limit."""

    weight: Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)] = 1.0
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    max_tokens: Limit | None = None

    @classmethod
    def of_headers(cls, weight: bytes | None, max_tokens: bytes | None) -> "TenantLimits | None":
        """Return the limits that a router sends with a request; None if there are no valid ones."""
        sent = {"weight": weight, "maxTokens": max_tokens}
        texts = {name: value.decode("latin-1") for name, value in sent.items() if value is not None}
        try:
            return cls.model_validate_strings(texts) if texts else None
        except ValidationError:
            return None


NO_LIMITS = TenantLimits()


class _Content(_Part):
    default: TenantLimits = NO_LIMITS
    tenants: dict[str, TenantLimits] = {}


class TenantsFile:
    """Belongs to one event loop. Raises StartupError for an unusable file. Without a `path` no tenant has limits."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_given = path is not None
        self._watch = FileWatch([path] if path is not None else [], clock)
        self._content = self._read()

    def limits(self, tenant: str) -> TenantLimits:
        if self._watch.has_changed():
            try:
                self._content = self._read()
            except StartupError as error:
                logger.error("the limits of tenants stay as they are: %s", error)
            else:
                logger.info("reloaded the limits of tenants: %d have their own", len(self._content.tenants))
        return self._content.tenants.get(tenant, self._content.default)

    def _read(self) -> _Content:
        content = next(map(_read_content, self._watch.paths), _Content())
        for name, limits in content.tenants.items():
            own = {field: getattr(limits, field) for field in limits.model_fields_set}
            content.tenants[name] = content.default.model_copy(update=own)
        return content


def _read_content(path: Path) -> _Content:
    try:
        return _Content.model_validate(load_yaml(read_watched(path)))
    except OSError as error:
        raise StartupError(f"{FLAG} {path}: cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        if first["type"] == "extra_forbidden":
            fields = (TenantLimits if len(first["loc"]) > 1 else _Content).model_fields.values()
            known = ", ".join(str(field.alias) for field in fields)
            raise StartupError(f"{FLAG} {path}: {place}it is no field: the fields here are {known}.") from None
        what = NO_MAPPING if first["type"] in ("model_type", "dict_type") else first["msg"]
        raise StartupError(f"{FLAG} {path}: {place}{what}, not {str(first['input'])[:100]!r}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StartupError(f"{FLAG} {path}: is not YAML: {' '.join(str(error).split())}.") from None


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML's own loader would ignore the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        places: dict[Any, yaml.Mark] = {}
        for key, _ in node.value:
            place = key.start_mark
            if (first := places.setdefault((key.tag, str(key.value)), place)) is not place:
                raise yaml.YAMLError(
                    f"the key {key.value!r} is in line {first.line + 1} and again in line {place.line + 1}: keep one "
                    "of them"
                )
        return super().construct_mapping(node, deep)


def load_yaml(text: str | bytes) -> Any:
    """Parse YAML. Raises YAMLError, also for a key that a mapping has twice."""
    return yaml.load(text, _Loader)
