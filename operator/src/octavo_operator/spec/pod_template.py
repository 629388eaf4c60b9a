"""Models of `podTemplate` in a spec: metadata and a PodSpec, of which only the lists that are merged are typed."""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from octavo_operator.spec.fields import Annotations, LabelValue, Name, PassedThrough, Resources, SpecPart

_OURS = ("serving.octavo.dev/", "app.kubernetes.io/")


class PodMetadata(SpecPart):
    labels: Annotated[dict[str, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    annotations: Annotations = Field(default_factory=dict)

    @model_validator(mode="after")
    def _leaves_ours(self) -> Self:
        if any(key.startswith(_OURS) for key in self.labels):
            raise ValueError(
                "labels under serving.octavo.dev/ and app.kubernetes.io/ are reserved for the operator: choose "
                "another prefix"
            )
        return self


class KubernetesPart(SpecPart):
    """Base of parts that Kubernetes defines: fields that are not listed pass through unchanged."""

    model_config = ConfigDict(extra="allow")


class NamedPart(KubernetesPart):
    name: Name


class PortPart(KubernetesPart):
    container_port: Annotated[int, Field(ge=1, le=65535)]


class MountPart(KubernetesPart):
    name: Name
    mount_path: Annotated[str, Field(min_length=1, max_length=1024)]


class ResourcesPart(Resources):
    model_config = ConfigDict(extra="allow")


class ContainerPart(KubernetesPart):
    name: Name
    env: Annotated[tuple[NamedPart, ...], Field(max_length=64)] = ()
    env_from: Annotated[tuple[PassedThrough, ...], Field(max_length=16)] = ()
    ports: Annotated[tuple[PortPart, ...], Field(max_length=16)] = ()
    volume_mounts: Annotated[tuple[MountPart, ...], Field(max_length=32)] = ()
    resources: ResourcesPart = ResourcesPart()


class PodSpecPart(KubernetesPart):
    containers: Annotated[tuple[ContainerPart, ...], Field(max_length=16)] = ()
    init_containers: Annotated[tuple[ContainerPart, ...], Field(max_length=16)] = ()
    volumes: Annotated[tuple[NamedPart, ...], Field(max_length=32)] = ()
    image_pull_secrets: Annotated[tuple[NamedPart, ...], Field(max_length=8)] = ()


class PodTemplate(SpecPart):
    metadata: PodMetadata = PodMetadata()
    spec: PodSpecPart = PodSpecPart()

    def manifest(self) -> dict[str, Any]:
        """The template as the user wrote it."""
        return self.model_dump(by_alias=True, exclude_unset=True)
