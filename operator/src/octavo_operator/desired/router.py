"""The router's Deployment, its account with the right to read EndpointSlices, and its disruption budget."""

import json
from collections.abc import Collection, Mapping

from octavo_operator.desired.network import path_prefix
from octavo_operator.desired.objects import (
    CONTAINER_SECURITY,
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
from octavo_operator.desired.service_secrets import ADMIN_SECRET_VARIABLE, secret_variables
from octavo_operator.desired.template_version import Versions, choose_template
from octavo_operator.names import (
    ADMIN,
    ENGINE,
    HTTP,
    ROUTER,
    ROUTER_ADMIN_PORT,
    ROUTER_PORT,
    TEMPLATE,
    engine_account,
    engine_selector,
    engines_service,
    router_account,
    router_deployment,
    router_selector,
    services_config,
)
from octavo_operator.observed import ServiceBehind
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.fields import num_of_share

DEFAULT_REPLICAS = 2
DEFAULT_RESOURCES: Manifest = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
KEYS_PATH = "/etc/octavo/keys"
SERVICES_PATH, SERVICES_FILE = "/etc/octavo/services", "services.json"
TENANTS_PATH, TENANTS_FILE = "/etc/octavo/tenants", "tenants.yaml"


def desired_router(
    service: InferenceService, settings: Settings, live: Collection[str], behind: Mapping[str, ServiceBehind]
) -> list[Manifest]:
    """The objects of the service's own router; none for a service that shares another service's router. `live`: the
    revision of the live Deployment's template. `behind`: the services behind the router."""
    if not service.owns_router:
        return []
    return [
        *_identity(service, settings),
        _services_config(service, behind),
        _deployment(service, settings, live),
        _budget(service),
    ]


def num_routers(service: InferenceService) -> int:
    return service.spec.router.replicas or DEFAULT_REPLICAS


def desired_engine_identity(service: InferenceService) -> Manifest:
    """A service account without rights: an engine never calls the API server."""
    return _account(service, engine_account(service.name), ENGINE)


def desired_engine_budget(service: InferenceService) -> Manifest:
    """The budget of all revisions together: during a rollout, pods of either revision keep the service available, and
    pods that don't start are evicted at any time."""
    replicas, limit = service.spec.replicas, service.spec.disruption_budget.max_unavailable
    return child(
        service,
        "policy/v1",
        "PodDisruptionBudget",
        f"{service.name}-engine",
        component=ENGINE,
        spec={
            "minAvailable": max(0, replicas - num_of_share(1 if limit is None else limit, replicas)),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": engine_selector(service.name)},
        },
    )


def _budget(service: InferenceService) -> Manifest:
    return child(
        service,
        "policy/v1",
        "PodDisruptionBudget",
        router_deployment(service.name),
        component=ROUTER,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": router_selector(service.name)},
        },
    )


def _identity(service: InferenceService, settings: Settings) -> list[Manifest]:
    """The router's account, bound to the installation's role, which lets it read EndpointSlices."""
    name, (kind, _, role) = router_account(service.name), settings.router_role.partition("/")
    binding = child(
        service,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        name,
        component=ROUTER,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": service.namespace}],
    )
    return [_account(service, name, ROUTER), binding]


def _services_config(service: InferenceService, behind: Mapping[str, ServiceBehind]) -> Manifest:
    """The ConfigMap with the services of these routers, by which they know models without a replica. Kubernetes updates
    the mounted file within about 90 s; until then, the models that replicas report count as well."""
    listed = [_listed(name, service_behind) for name, service_behind in sorted(behind.items())]
    data = {SERVICES_FILE: json.dumps({"services": listed})}
    return child(service, "v1", "ConfigMap", services_config(service.name), component=ROUTER, data=data)


def _listed(name: str, found: ServiceBehind) -> Manifest:
    fields = {"adapters": list(found.adapters) or None, "sleeps": found.sleeps or None, "wakeSeconds": found.wake_s}
    return {"name": name, "models": list(found.models)} | drop_none(fields)


def _account(service: InferenceService, name: str, component: str) -> Manifest:
    return child(service, "v1", "ServiceAccount", name, component=component, automountServiceAccountToken=False)


def _deployment(service: InferenceService, settings: Settings, live: Collection[str]) -> Manifest:
    template = choose_template(TEMPLATES, service, settings, live)
    manifest = child(
        service,
        "apps/v1",
        "Deployment",
        router_deployment(service.name),
        component=ROUTER,
        spec={
            "replicas": num_routers(service),
            "revisionHistoryLimit": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": router_selector(service.name)},
            "template": template.content,
        },
    )
    manifest["metadata"]["annotations"] = {TEMPLATE: template.revision}
    return manifest


def _template(service: InferenceService, settings: Settings) -> Manifest:
    return with_template(_own_template(service, settings), service.spec.router.pod_template)


def _template_with_expanded_flags(service: InferenceService, settings: Settings) -> Manifest:
    template, router = _own_template(service, settings), service.spec.router
    (container,) = template["spec"]["containers"]
    container["args"] = with_expanded(container["args"], router.extra_args)
    return with_template(template, router.pod_template)


def _template_without_admin_secret(service: InferenceService, settings: Settings) -> Manifest:
    template = _template_with_expanded_flags(service, settings)
    container = next(each for each in template["spec"]["containers"] if each["name"] == ROUTER)
    container["env"] = [variable for variable in container["env"] if variable["name"] != ADMIN_SECRET_VARIABLE]
    return template


TEMPLATES: Versions = {1: _template_without_admin_secret, 2: _template_with_expanded_flags, 3: _template}


def router_template_conflicts(service: InferenceService, settings: Settings) -> list[str]:
    """Fields of `router.podTemplate` that the operator sets itself."""
    return conflicts(_own_template(service, settings), service.spec.router.pod_template)


def _own_template(service: InferenceService, settings: Settings) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "services", "configMap": {"name": services_config(service.name)}},
    ]
    if keys := _keys_secret(service):
        volumes.append({"name": "keys", "secret": {"secretName": keys}})
    if limits := _limits_config(service):
        volumes.append({"name": "tenants", "configMap": {"name": limits}})
    pod = {
        "serviceAccountName": router_account(service.name),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.grace_s(settings),
        "securityContext": pod_security(settings),
        "imagePullSecrets": pull_secrets(service, settings),
        "topologySpreadConstraints": [_spread_routers(service)],
        "containers": [_container(service, settings)],
        "volumes": volumes,
    }
    return {"metadata": pod_metadata(service, ROUTER), "spec": drop_none(pod)}


def _container(service: InferenceService, settings: Settings) -> Manifest:
    router = service.spec.router
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "services", "mountPath": SERVICES_PATH, "readOnly": True},
    ]
    if _keys_secret(service):
        mounts.append({"name": "keys", "mountPath": KEYS_PATH, "readOnly": True})
    if _limits_config(service):
        mounts.append({"name": "tenants", "mountPath": TENANTS_PATH, "readOnly": True})
    container = {
        "name": ROUTER,
        "image": router.image or settings.router_image,
        "imagePullPolicy": router.image_pull_policy or settings.image_pull_policy,
        "args": [*literal(["route", *_flags(service, settings)]), *router.extra_args],
        "env": [*secret_variables(service), *dump_parts(router.env)],
        "ports": [
            {"name": HTTP, "containerPort": ROUTER_PORT},
            {"name": ADMIN, "containerPort": ROUTER_ADMIN_PORT},
        ],
        "resources": resources(router.resources, DEFAULT_RESOURCES),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": TERMINATION_MESSAGE_POLICY,
        "startupProbe": probe("/health", period_s=1, failures=60),
        "readinessProbe": probe("/ready", period_s=5, failures=2),
        "livenessProbe": probe("/health", period_s=10, failures=6),
        "volumeMounts": mounts,
    }
    return drop_none(container)


def _flags(service: InferenceService, settings: Settings) -> list[str]:
    flags = [
        f"--port={ROUTER_PORT}",
        f"--admin-port={ROUTER_ADMIN_PORT}",
        f"--kubernetes={engines_service(service.name)}",
        f"--services-file={SERVICES_PATH}/{SERVICES_FILE}",
        f"--drain-timeout={service.drain_timeout_s}",
        f"--shutdown-delay={settings.lame_duck_s}",
        "--log-format=json",
    ]
    if prefix := path_prefix(service):
        flags.append(f"--root-path={prefix}")
    if _keys_secret(service):
        flags.append(f"--api-key-file={KEYS_PATH}")
    if _limits_config(service):
        flags.append(f"--tenants-file={TENANTS_PATH}/{TENANTS_FILE}")
    return flags


def _keys_secret(service: InferenceService) -> str | None:
    auth = service.spec.auth
    return None if auth is None or auth.api_keys_secret_ref is None else auth.api_keys_secret_ref.name


def _limits_config(service: InferenceService) -> str | None:
    """Return the ConfigMap with the limits of tenants. Engines get none: the router enforces the limits, and sends the
    engines each tenant's weight."""
    auth = service.spec.auth
    return None if auth is None or auth.limits is None else auth.limits.name


def _spread_routers(service: InferenceService) -> Manifest:
    """Spread the routers over different nodes, if there are several."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": router_selector(service.name)},
    }
