"""The engine's pods: one Deployment per revision, whose template never changes, or one LeaderWorkerSet if each replica
has several pods: a leader, which answers requests, and its workers.

A revision is the hash of the pod template, or of both templates and the number of pods. The template has all inputs
that an engine reads when it starts. So changes that apply to running engines (API keys, the number of replicas) and
changes of the router cause no rollout. The plan creates and deletes the object of each revision, so Kubernetes' own
rollout, which ignores the routers, never runs.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import dropwhile, islice, takewhile
from typing import Any

from octavo_operator.desired.adapters import adapter_flags, adapter_mounts, adapter_volumes
from octavo_operator.desired.devices import container_security, device_environment, device_of, shared_memory
from octavo_operator.desired.objects import (
    TERMINATION_MESSAGE_POLICY,
    Manifest,
    child,
    drop_none,
    dump_parts,
    literal,
    pod_metadata,
    pod_security,
    probe,
    pull_secrets,
    resources,
    with_expanded,
)
from octavo_operator.desired.pod_template import conflicts, with_template
from octavo_operator.desired.template_version import RenderedTemplate, Versions, choose_template
from octavo_operator.desired.weights import CACHE_VARIABLES, secret_environment, weights_of, with_users_variables
from octavo_operator.names import (
    ADMITTED_GATE,
    DEPLOYMENT,
    ENGINE,
    ENGINE_PORT,
    ENGINE_WORKER,
    GROUP_SET,
    HTTP,
    REVISION_LABEL,
    ROUTER_LABEL,
    engine_account,
    engine_deployment,
    engine_group_set,
    engine_selector,
    group_secret,
    router_secret,
)
from octavo_operator.observed import Ref
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.access import isolates_tenants
from octavo_operator.spec.fields import num_bytes

NAMES_FLAG = "--served-model-name"
STARTUP_S = 3600  # limit of the startup probe: loading a large model may take long
#: Seconds of a worker's grace period beyond that of its leader, with which it ends.
WORKER_GRACE_S = 30
_PROBES = {
    "startupProbe": probe("/health", period_s=2, failures=STARTUP_S // 2),
    "readinessProbe": probe("/ready", period_s=5, failures=2),
    "livenessProbe": probe("/health", period_s=10, failures=6),
}
_GIB = 2**30


def engine_revision(service: InferenceService, settings: Settings, *, live: Collection[str] = ()) -> str:
    """The wanted revision. `live`: revisions that have an object."""
    return choose_template(_versions(service), service, settings, live).revision


def engine_ref(service: InferenceService, revision: str) -> Ref:
    """Kind and name of the object with the replicas of the revision that the spec asks for."""
    if service.num_nodes > 1:
        return GROUP_SET, engine_group_set(service.name, revision)
    return DEPLOYMENT, engine_deployment(service.name, revision)


def desired_engine(
    service: InferenceService, settings: Settings, *, replicas: int, live: Collection[str] = ()
) -> Manifest:
    """The Deployment or LeaderWorkerSet of the wanted revision. `live`: revisions that have an object."""
    chosen = choose_template(_versions(service), service, settings, live)
    kind, name = engine_ref(service, chosen.revision)
    version, make_spec = (GROUP_API, _group_set_spec) if kind == GROUP_SET else ("apps/v1", _deployment_spec)
    spec = {"replicas": replicas, **make_spec(service, chosen)}
    manifest = child(service, version, kind, name, component=ENGINE, spec=spec)
    manifest["metadata"]["labels"] |= {REVISION_LABEL: chosen.revision, ROUTER_LABEL: service.router}
    for template in engine_templates(manifest):
        template["metadata"]["labels"] |= {REVISION_LABEL: chosen.revision}
    return manifest


def _deployment_spec(service: InferenceService, chosen: RenderedTemplate) -> Manifest:
    return {
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": STARTUP_S,
        "selector": {"matchLabels": engine_selector(service.name) | {REVISION_LABEL: chosen.revision}},
        "template": chosen.content,
    }


def _group_set_spec(service: InferenceService, chosen: RenderedTemplate) -> Manifest:
    """Return the spec of a LeaderWorkerSet, which restarts no pods.

    If the engine in one pod of a replica ends, so do those in its other pods; Kubernetes restarts their containers.
    """
    return {
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "leaderWorkerTemplate": {"size": service.num_nodes, "restartPolicy": "None", **chosen.content["templates"]},
    }


def engine_templates(live: Mapping[str, Any]) -> list[Any]:
    """The pod templates of a Deployment or LeaderWorkerSet. The first one is that of the engines."""
    if live["kind"] == GROUP_SET:
        return [live["spec"]["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [live["spec"]["template"]]


def served_names(live: Mapping[str, Any]) -> frozenset[str]:
    """The model names that the engines of a Deployment or LeaderWorkerSet serve."""
    names: set[str] = set()
    for container in engine_templates(live)[0]["spec"]["containers"]:
        rest = dropwhile(lambda arg: arg != NAMES_FLAG, container.get("args") or ())
        given = takewhile(lambda arg: not arg.startswith("--"), islice(rest, 1, None))
        names.update(name.replace("$$", "$") for name in given)
    return frozenset(names)


def template_conflicts(service: InferenceService, settings: Settings) -> list[str]:
    """Fields of `engine.podTemplate` that the operator sets itself."""
    return conflicts(_own_template(service, settings), service.spec.engine.pod_template)


def _template(service: InferenceService, settings: Settings) -> Manifest:
    return with_template(_own_template(service, settings), service.spec.engine.pod_template)


def _template_without_order(service: InferenceService, settings: Settings) -> Manifest:
    """Version 1: the kubelet expands all arguments. The operator's variables come first, even with a value of the
    user's, and the init container has no other ones."""
    template, ours = _own_template(service, settings), [v["name"] for v in _own_variables(service)]
    (engine,), others = template["spec"]["containers"], template["spec"].get("initContainers", ())
    engine["args"] = with_expanded(engine["args"], service.spec.engine.extra_args)
    for container in (engine, *others):
        container["env"].sort(key=lambda v: ours.index(v["name"]) if v["name"] in ours else len(ours))
    for container in others:
        container["args"] = with_expanded(container["args"], ())
        container["env"] = container["env"][: len(CACHE_VARIABLES)]
    return with_template(template, service.spec.engine.pod_template)


def _group(service: InferenceService, settings: Settings) -> Manifest:
    """Content whose hash is the revision."""
    names = {"leaderTemplate": ENGINE, "workerTemplate": ENGINE_WORKER}
    given = service.spec.engine.pod_template
    made = {name: with_template(_own_template(service, settings, part), given) for name, part in names.items()}
    return {"size": service.num_nodes, "templates": made}


TEMPLATES: Versions = {1: _template_without_order, 2: _template}
GROUPS: Versions = {1: _group}
GROUP_API = "leaderworkerset.x-k8s.io/v1"


def _versions(service: InferenceService) -> Versions:
    return GROUPS if service.num_nodes > 1 else TEMPLATES


def _own_template(service: InferenceService, settings: Settings, component: str = ENGINE) -> Manifest:
    spec, weights, is_worker = service.spec, weights_of(service, settings), component == ENGINE_WORKER
    pod = {
        "serviceAccountName": engine_account(service.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "readinessGates": None if is_worker else [{"conditionType": ADMITTED_GATE}],
        "terminationGracePeriodSeconds": service.grace_s(settings) + WORKER_GRACE_S * is_worker,
        "securityContext": pod_security(settings),
        "imagePullSecrets": pull_secrets(service, settings),
        "nodeSelector": spec.node_selector,
        "tolerations": dump_parts(spec.tolerations) or None,
        "affinity": spec.affinity,
        "topologySpreadConstraints": [_spread_engines(c, service) for c in spec.topology_spread_constraints] or None,
        "runtimeClassName": spec.runtime_class_name,
        "priorityClassName": spec.priority_class_name,
        "initContainers": list(weights.init_containers) or None,
        "containers": [_container(service, settings, component)],
        "volumes": [
            *weights.volumes,
            {"name": "tmp", "emptyDir": {}},
            *shared_memory(service)[1],
            *adapter_volumes(service),
        ],
    }
    return {"metadata": pod_metadata(service, component), "spec": drop_none(pod)}


def _container(service: InferenceService, settings: Settings, component: str) -> Manifest:
    spec, weights = service.spec, weights_of(service, settings)
    mounts = [*weights.mounts, {"name": "tmp", "mountPath": "/tmp"}]
    mounts += shared_memory(service)[0]
    mounts += adapter_mounts(service)
    container = {
        "name": ENGINE,
        "image": spec.engine.image or settings.engine_image,
        "imagePullPolicy": spec.engine.image_pull_policy or settings.image_pull_policy,
        "args": [
            *literal(["serve", weights.model, *_flags(service, settings)]),
            *_group_flags(service, component),
            *spec.engine.extra_args,
        ],
        "env": with_users_variables(service, _own_variables(service)),
        "envFrom": secret_environment(service) or None,
        "ports": [{"name": HTTP, "containerPort": ENGINE_PORT}],
        "resources": resources(spec.resources),
        "securityContext": container_security(service),
        "terminationMessagePolicy": TERMINATION_MESSAGE_POLICY,
        **_PROBES,
        "volumeMounts": mounts,
    }
    return drop_none(container)


def _flags(service: InferenceService, settings: Settings) -> Iterator[str]:
    yield f"--port={ENGINE_PORT}"
    yield "--router-only"
    yield f"--shutdown-delay={settings.lame_duck_s}"
    yield "--log-format=json"
    if service.spec.engine.device is None:
        yield f"--device={device_of(service)}"
    if isolates_tenants(service.spec.auth):
        yield "--cache-isolation"  # also without API keys, so that adding the first key causes no rollout
    yield from adapter_flags(service)
    yield from engine_flags(service)


def _group_flags(service: InferenceService, component: str) -> Iterator[str]:
    """Flags by which the pods of a replica find each other. LeaderWorkerSet sets the variables of the workers."""
    if service.num_nodes == 1:
        return
    yield f"--nnodes={service.num_nodes}"
    if component == ENGINE:
        yield from ("--node-rank=0", "--master-addr=$(POD_IP)")
    else:
        yield from ("--headless", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)")


def engine_flags(service: InferenceService) -> Iterator[str]:
    """Flags of a service's engines, the same on Kubernetes and on one machine, before `engine.extraArgs`."""
    model, engine, parallelism = service.spec.model, service.spec.engine, service.spec.parallelism
    yield NAMES_FLAG
    yield from service.served_names
    pairs = {
        "revision": model.revision,
        "tokenizer": model.tokenizer,
        "chat-template": model.chat_template,
        "dtype": model.dtype,
        "device": engine.device,
        "tensor-parallel-size": parallelism.tensor if parallelism.tensor != 1 else None,
        "pipeline-parallel-size": parallelism.pipeline if parallelism.pipeline != 1 else None,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "block-size": engine.block_size,
        "gpu-memory-utilization": engine.gpu_memory_utilization_percent
        and f"{engine.gpu_memory_utilization_percent / 100:g}",
        "kv-cache-memory-bytes": engine.kv_cache_memory and num_bytes(engine.kv_cache_memory),
        "swap-space": engine.swap_space and f"{num_bytes(engine.swap_space) / _GIB:g}",
        "tool-call-parser": engine.tool_call_parser,
        "reasoning-parser": engine.reasoning_parser,
        "drain-timeout": service.drain_timeout_s,
    }
    yield from (f"--{name}={value}" for name, value in pairs.items() if value is not None)
    if engine.tool_call_parser is not None:
        yield "--enable-auto-tool-choice"
    if engine.prefix_caching is False:
        yield "--no-enable-prefix-caching"


def _own_variables(service: InferenceService) -> list[Manifest]:
    secret = {"secretKeyRef": {"name": router_secret(service.router), "key": "secret"}}
    variables = [
        *CACHE_VARIABLES,
        {"name": "OCTAVO_ROUTER_SECRET", "valueFrom": secret},
        *device_environment(service),
    ]
    if service.num_nodes > 1:
        shared = {"secretKeyRef": {"name": group_secret(service.name), "key": "secret"}}
        variables.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
        variables.append({"name": "OCTAVO_GROUP_SECRET", "valueFrom": shared})
    return variables


def _spread_engines(constraint: dict[str, Any], service: InferenceService) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": engine_selector(service.name)}} | constraint
