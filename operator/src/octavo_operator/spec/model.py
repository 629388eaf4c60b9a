"""Models of `spec.model`: the model's source, the cache of its files, and the init container that fetches them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.fields import Name, Quantity, Reference, Resources, SpecPart

#: Locations that engines accept: a model on a hub, also with a file or glob; a bucket or package; a folder.
_LOCATIONS = r"(hf|ms)://[^/\s]+/[^/\s]+(/.*)?|(s3|gs|az|azure|pkg)://[^/\s]+(/.*)?|file:///.+"
#: A claim and a path on it, neither with a part that is "..".
_ON_CLAIM = r"pvc://(\.?[^/.\s][^/\s]*|\.\.[^/\s]+)(/(\.?[^/.][^/]*|\.\.[^/]+|\.)?)*"
URI_PATTERN = f"^({_LOCATIONS}|{_ON_CLAIM})$"
HUBS = ("hf", "ms")
TOKENIZER_PATTERN = f"^({_LOCATIONS})$"
#: Pattern of texts that no command takes for a flag.
NO_FLAG = "^[^-]"
#: Pattern -> its description in errors.
FORMS = {
    URI_PATTERN: (
        "must be hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, "
        "pvc://CLAIM/PATH (without '..'), file:///PATH or pkg://NAME"
    ),
    TOKENIZER_PATTERN: (
        "must be hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, "
        "file:///PATH or pkg://NAME"
    ),
    NO_FLAG: "must not begin with '-': it would be read as a flag",
}
ServedName = Annotated[str, Field(min_length=1, max_length=256, pattern=NO_FLAG)]


def claim_name(uri: str) -> str | None:
    """The PersistentVolumeClaim of a pvc:// location; None for other locations."""
    scheme, _, rest = uri.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else None


class Cache(SpecPart):
    mode: Literal["EmptyDir", "PVC", "HostPath"]
    size: Quantity | None = None
    claim_name: Name | None = None
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None  # empty: no class
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = None
    retention_policy: Literal["Delete", "Retain"] | None = None
    host_path: Annotated[str, Field(max_length=1024, pattern="^/.+")] | None = None

    @property
    def is_created(self) -> bool:
        """True for a claim that the operator creates."""
        return self.mode == "PVC" and self.size is not None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        named, made, classed = (value is not None for value in (self.claim_name, self.size, self.storage_class_name))
        if (self.mode == "PVC" and not (named or made)) or (self.mode != "PVC" and (named or classed)):
            raise ValueError(
                "cache.mode PVC needs claimName (a claim that exists) or size (a claim made for this service); "
                "other modes have neither claimName nor storageClassName"
            )
        if named and (made or classed):
            raise ValueError("cache.claimName names a claim that exists: leave size and storageClassName out")
        if self.access_mode is not None and (named or self.mode != "PVC"):
            raise ValueError("cache.accessMode is for a claim that the operator creates: it needs mode PVC and size")
        if self.retention_policy is not None and (named or self.mode != "PVC"):
            raise ValueError("cache.retentionPolicy is for a claim that the operator creates: use mode PVC and size")
        if (self.mode == "HostPath") != (self.host_path is not None):
            raise ValueError("cache.hostPath is only for mode HostPath, which needs it")
        if made and self.mode == "HostPath":
            raise ValueError("cache.size is for modes EmptyDir and PVC")
        return self


class Prefetch(SpecPart):
    resources: Resources | None = None


class Model(SpecPart):
    uri: Annotated[str, Field(min_length=7, max_length=1024, pattern=URI_PATTERN)]
    revision: Annotated[str, Field(min_length=1, max_length=255, pattern=NO_FLAG)] | None = None
    served_names: Annotated[tuple[ServedName, ...], Field(min_length=1, max_length=16)] | None = None
    tokenizer: Annotated[str, Field(min_length=1, max_length=1024, pattern=TOKENIZER_PATTERN)] | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    secret_ref: Reference | None = None
    cache: Cache | None = None
    prefetch: Prefetch | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.revision is not None and self.scheme not in HUBS:
            raise ValueError(
                "model.revision is a branch, tag or commit of a hub repository: it needs a uri that begins with hf:// "
                "or ms://"
            )
        if self.cache is not None and self.scheme == "pvc":
            raise ValueError("a pvc:// model is mounted directly from its claim: leave model.cache out")
        if self.served_names is not None and len(set(self.served_names)) != len(self.served_names):
            raise ValueError("model.servedNames has a name twice: list each name once")
        return self

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0]
