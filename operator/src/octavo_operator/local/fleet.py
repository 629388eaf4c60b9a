"""`read_fleet`: converts a manifest to the processes that `octavo up -f` runs on one machine, as plain data.

The server calls it through the entry point `octavo.infsvc`: neither package imports the other. The engines' flags come
from the same code as the arguments of their pods, so that one machine and a cluster can't differ.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from octavo_operator.desired.engine import engine_flags
from octavo_operator.local.documents import Documents, read_documents
from octavo_operator.service import InferenceService
from octavo_operator.spec.access import isolates_tenants
from octavo_operator.spec.engine import EnvVar
from octavo_operator.spec.service import InvalidSpec

_POD = "it places pods on nodes, and everything runs on this machine"
#: Fields of the spec without effect on one machine -> reason, for the note about each one that is set.
_IGNORED = {
    "parallelism.nodes": "all ranks of a replica run on this machine",
    "resources": "engines share this machine: nothing is reserved or limited",
    "sharedMemory": "processes use this machine's shared memory",
    "nodeSelector": _POD,
    "tolerations": _POD,
    "affinity": _POD,
    "topologySpreadConstraints": _POD,
    "priorityClassName": _POD,
    "runtimeClassName": "there are no containers here",
    "imagePullSecrets": "there are no images here",
    "engine.image": "the installed octavo is the engine",
    "engine.podTemplate": "there are no pods here",
    "engine.imagePullPolicy": "there are no images here",
    "model.cache": "models are in this machine's own caches",
    "model.prefetch": "the first engine fetches the model",
    "router.replicas": "one router runs; --router-args='--workers N' gives it several processes",
    "router.image": "the installed octavo is the router",
    "router.imagePullPolicy": "there are no images here",
    "router.resources": "nothing is reserved or limited",
    "router.extraArgs": "--router-args gives flags to the router",
    "router.env": "the router has the variables of this shell",
    "router.service": "the endpoint is at --host and --port",
    "router.podTemplate": _POD,
    "auth.limits": "--router-args='--tenants-file FILE' gives the router the file",
    "exposure": "the endpoint is at --host and --port",
    "disruptionBudget": "this machine is never drained",
    "networkPolicy": "engines listen on the loopback interface only, the router at --host",
    "podMetadata": "there are no pods here",
}


def read_fleet(text: str, *, brings_keys: bool = False) -> dict[str, Any]:
    """Convert a manifest. `brings_keys`: the caller has its own API keys, which replace the manifest's. Raises
    ValueError, whose message has a line for each fault."""
    try:
        documents = read_documents(text)
        faults = [*_router_faults(documents), *_reference_faults(documents, brings_keys)]
        if faults:
            raise InvalidSpec("\n".join(faults))
    except InvalidSpec as error:
        raise ValueError(str(error)) from None
    services = list(documents.services.values())
    return {
        "services": [_service(service, documents, brings_keys) for service in services],
        "keys": None if brings_keys else _keys(documents),
        "drain_timeout_s": max(service.drain_timeout_s for service in services),
        "notes": [*documents.notes, *_router_notes(services), *(n for s in services for n in _ignored_field_notes(s))],
    }


def _service(service: InferenceService, found: Documents, brings_keys: bool) -> dict[str, Any]:
    spec = service.spec
    args = [spec.model.uri, *_adapter_flags(service), *engine_flags(service), *spec.engine.extra_args]
    auth = _auth(found)
    if (brings_keys or auth is not None) and isolates_tenants(auth):
        args.append("--cache-isolation")
    return {
        "name": service.name,
        "served_names": list(service.served_names),
        "replicas": spec.replicas,
        "args": args,
        "env": _environment(service, found),
    }


def _adapter_flags(service: InferenceService) -> Iterator[str]:
    """Flags of the adapters, which one machine loads at the start."""
    if service.spec.adapters is not None:
        yield "--enable-lora"
    if service.spec.adapters:
        yield "--lora-modules"
        yield from (json.dumps({"name": adapter.name, "path": adapter.uri}) for adapter in service.spec.adapters)


def _environment(service: InferenceService, found: Documents) -> dict[str, str]:
    ref = service.spec.model.secret_ref
    env = {} if ref is None else dict(found.configs.get(("Secret", ref.name), {}))
    for variable in service.spec.engine.env:
        value = _value(variable, found)
        if value is not None:
            env[variable.name] = value
    return env


def _value(variable: EnvVar, found: Documents) -> str | None:
    if variable.value_from is None:
        return variable.value or ""
    kind, ref = _source(variable)
    return found.configs.get((kind, ref.name), {}).get(ref.key)


def _source(variable: EnvVar) -> tuple[str, Any]:
    assert variable.value_from is not None
    secret = variable.value_from.secret_key_ref
    return ("ConfigMap", variable.value_from.config_map_key_ref) if secret is None else ("Secret", secret)


def _auth(found: Documents) -> Any:
    """The `auth` of any service with API keys; `_router_faults` ensures that all services have the same keys."""
    auths = (service.spec.auth for service in found.services.values())
    return next((auth for auth in auths if auth is not None and auth.api_keys_secret_ref is not None), None)


def _keys(found: Documents) -> dict[str, str] | None:
    auth = _auth(found)
    return None if auth is None else found.configs["Secret", auth.api_keys_secret_ref.name]


def _router_faults(found: Documents) -> Iterator[str]:
    """Yield a line for each setting that prevents the one router of `octavo up` from serving all services."""
    owners = [service for service in found.services.values() if service.owns_router]
    for service in found.services.values():
        if service.router not in {owner.name for owner in owners}:
            yield (
                f"{_about(service)}.router.ref.name: {service.router!r} is not a service with its own router in this "
                "file: add it, or correct the name"
            )
        allowed = found.services[service.router].spec.router.allow_from if service.router in found.services else None
        if not service.owns_router and allowed is not None and service.name not in allowed:
            yield (
                f"{_about(service)}.router.ref.name: spec.router.allowFrom of {service.router} does not list "
                f"{service.name}: add it there, or leave router.ref out"
            )
    secrets = {ref.name if (ref := _keys_ref(owner)) else None: owner.name for owner in owners}
    if len(secrets) > 1:
        one, other, *_ = secrets.values()
        yield (
            f"InferenceService {other}: spec.auth: its API keys differ from {one}'s, and one machine has one router: "
            "run each with its own octavo up, or let one share the other's router (spec.router.ref)"
        )


def _reference_faults(found: Documents, brings_keys: bool) -> Iterator[str]:
    for service in found.services.values():
        ref = _keys_ref(service)
        if ref is not None and not brings_keys and not found.configs.get(("Secret", ref.name)):
            yield (
                f"{_about(service)}.auth.apiKeysSecretRef.name: no Secret {ref.name!r} with entries in this file: add "
                "it (stringData: {tenant: key}), or give the keys with --api-key-file"
            )
        for position, variable in enumerate(service.spec.engine.env):
            if variable.value_from is None:
                continue
            kind, source = _source(variable)
            if not source.optional and source.key not in found.configs.get((kind, source.name), {}):
                yield (
                    f"{_about(service)}.engine.env[{position}].valueFrom: no {kind} "
                    f"{source.name!r} with the entry {source.key!r} in this file: add it"
                )
    if not any(service.spec.replicas for service in found.services.values()):
        yield "spec.replicas is 0 in every service: there is nothing to run"


def _about(service: InferenceService) -> str:
    return f"InferenceService {service.name}: spec"


def _keys_ref(service: InferenceService) -> Any:
    return None if service.spec.auth is None else service.spec.auth.api_keys_secret_ref


def _router_notes(services: list[InferenceService]) -> Iterator[str]:
    owners = [service.name for service in services if service.owns_router]
    if len(owners) > 1:
        yield f"{', '.join(owners)} have one router each on Kubernetes; here one router serves all of them"
    for service in services:
        if not service.spec.replicas:
            yield f"{service.name}: spec.replicas is 0: no engine serves it"


def _ignored_field_notes(service: InferenceService) -> Iterator[str]:
    for path, text in _IGNORED.items():
        if _is_set(service.spec, path) and not (path == "router.replicas" and service.spec.router.replicas == 1):
            yield f"{service.name}: spec.{path} has no effect here: {text}"


def _is_set(spec: BaseModel, path: str) -> bool:
    part: BaseModel = spec
    *parents, last = path.split(".")
    for name in parents:
        value = getattr(part, _field_of(part, name))
        if not isinstance(value, BaseModel):
            return False
        part = value
    return _field_of(part, last) in part.model_fields_set


def _field_of(part: BaseModel, alias: str) -> str:
    return next(name for name, field in type(part).model_fields.items() if field.alias == alias)
