"""The network objects of a service: Services, Ingress or HTTPRoute, NetworkPolicies."""

from collections.abc import Mapping
from typing import Any

from octavo_operator.desired.objects import Manifest, child, drop_none
from octavo_operator.names import (
    COMPONENT_LABEL,
    ENGINE,
    ENGINE_GROUP,
    ENGINE_PORT,
    ENGINE_WORKER,
    HTTP,
    MANAGER,
    ROUTER,
    ROUTER_ADMIN_PORT,
    ROUTER_PORT,
    SERVICE_LABEL,
    SERVICE_PORT,
    engines_behind_router,
    engines_service,
    router_selector,
)
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.access import Gateway, Ingress

MAX_BODY = "64m"
READ_TIMEOUT_S = 3600
API_PATH = "/v1"  # under which routers serve the API of the models
ANY_PEER = None  # peers of a NetworkPolicy rule that admits everybody
DNS_PORTS = (53, 5353)  # of a Service, and of OpenShift's pods
API_PORTS = (443, 6443)  # the API server is no pod, and its address is unknown
#: IngressClass -> annotations that streaming needs: no buffering, large request bodies, long read timeouts.
INGRESS_ANNOTATIONS: dict[str, dict[str, str]] = {
    "nginx": {
        "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-request-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-body-size": MAX_BODY,
        "nginx.ingress.kubernetes.io/proxy-read-timeout": str(READ_TIMEOUT_S),
        "nginx.ingress.kubernetes.io/proxy-send-timeout": str(READ_TIMEOUT_S),
    },
    "haproxy": {"haproxy-ingress.github.io/timeout-server": f"{READ_TIMEOUT_S}s"},
    "alb": {"alb.ingress.kubernetes.io/load-balancer-attributes": f"idle_timeout.timeout_seconds={READ_TIMEOUT_S}"},
    "traefik": {},
}


def desired_network(service: InferenceService, settings: Settings) -> list[Manifest]:
    """Network objects of a service. A service without its own router has only a Service and, if its replicas have
    several pods, a NetworkPolicy of these pods."""
    manifests, has_policies = [_public_service(service)], service.spec.network_policy.enabled is not False
    if service.owns_router:
        manifests += [_headless_service(service), *_exposure(service, settings)]
        if has_policies:
            manifests += [_router_policy(service, settings), _engine_policy(service, settings)]
    if service.num_nodes > 1 and has_policies:
        manifests.append(_group_policy(service))
    return manifests


def internal_url(service: InferenceService, settings: Settings) -> str:
    return f"http://{service.name}.{service.namespace}.svc.{settings.cluster_domain}"


def exposed_url(service: InferenceService) -> str | None:
    """URL, without /v1, of the Ingress or of the first host name of the Gateway's route; None without one host name."""
    exposure = service.spec.exposure
    if exposure is None:
        return None
    if (ingress := exposure.ingress) is not None:
        scheme, hosts = "http" if ingress.tls_secret_name is None else "https", [ingress.host]
    else:
        assert exposure.gateway is not None
        scheme, hosts = exposure.gateway.scheme or "http", list(exposure.gateway.hostnames)
    host = next((host for host in hosts if not host.startswith("*")), None)
    return None if host is None else f"{scheme}://{host}{path_prefix(service)}"


def load_balancer_url(live: Mapping[str, Any]) -> str | None:
    """URL, without /v1, of a public Service's load balancer; None before the cloud has assigned an address."""
    balancer = (live.get("status") or {}).get("loadBalancer") or {}
    points = balancer.get("ingress") or [{}]
    host = points[0].get("hostname") or points[0].get("ip")
    return None if host is None else f"http://[{host}]" if ":" in host else f"http://{host}"


def path_prefix(service: InferenceService) -> str:
    """Path of the Ingress before /v1, empty or without a slash at its end."""
    exposure = service.spec.exposure
    path = exposure.ingress.path if exposure is not None and exposure.ingress is not None else None
    return (path or "").rstrip("/").removesuffix(API_PATH)


def _public_service(service: InferenceService) -> Manifest:
    """The Service for clients. Fields that the spec lacks, such as node ports, belong to Kubernetes and to clouds."""
    wanted = service.spec.router.service
    ports = [{"name": HTTP, "port": SERVICE_PORT, "targetPort": HTTP, "protocol": "TCP"}]
    spec = {"type": wanted.type, "selector": router_selector(service.router), "ports": ports}
    manifest = child(service, "v1", "Service", service.name, component=ROUTER, spec=drop_none(spec))
    if wanted.annotations:
        manifest["metadata"]["annotations"] = dict(wanted.annotations)
    return manifest


def _headless_service(service: InferenceService) -> Manifest:
    return child(
        service,
        "v1",
        "Service",
        engines_service(service.name),
        component=ENGINE,
        spec={
            "clusterIP": "None",
            "selector": engines_behind_router(service.name),
            "ports": [{"name": HTTP, "port": ENGINE_PORT, "targetPort": HTTP, "protocol": "TCP"}],
        },
    )


def _exposure(service: InferenceService, settings: Settings) -> list[Manifest]:
    exposure = service.spec.exposure
    if exposure is None:
        return []
    if exposure.ingress is not None:
        return [_ingress(service, exposure.ingress)]
    assert exposure.gateway is not None
    return [_route(service, exposure.gateway)] if settings.has_gateway_api else []


def _ingress(service: InferenceService, wanted: Ingress) -> Manifest:
    backend = {"service": {"name": service.name, "port": {"name": HTTP}}}
    paths = [{"path": wanted.path or "/", "pathType": "Prefix", "backend": backend}]
    tls = None if wanted.tls_secret_name is None else [{"hosts": [wanted.host], "secretName": wanted.tls_secret_name}]
    manifest = child(
        service,
        "networking.k8s.io/v1",
        "Ingress",
        service.name,
        component=ROUTER,
        spec=drop_none(
            {
                "ingressClassName": wanted.ingress_class_name,
                "rules": [{"host": wanted.host, "http": {"paths": paths}}],
                "tls": tls,
            }
        ),
    )
    if annotations := _annotations(wanted):
        manifest["metadata"]["annotations"] = annotations
    return manifest


def _annotations(wanted: Ingress) -> dict[str, str]:
    defaults = next((a for name, a in INGRESS_ANNOTATIONS.items() if name in (wanted.ingress_class_name or "")), {})
    return defaults | wanted.annotations


def _route(service: InferenceService, wanted: Gateway) -> Manifest:
    rule: dict[str, Any] = {
        "backendRefs": [{"name": service.name, "port": SERVICE_PORT}],
        "timeouts": {"request": "0s"},  # no limit: responses are streams, which end by the engine's own limits
    }
    return child(
        service,
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        service.name,
        component=ROUTER,
        spec=drop_none(
            {
                "parentRefs": [ref.model_dump(by_alias=True, exclude_none=True) for ref in wanted.parent_refs],
                "hostnames": list(wanted.hostnames) or None,
                "rules": [rule],
            }
        ),
    )


def _router_policy(service: InferenceService, settings: Settings) -> Manifest:
    """NetworkPolicy of routers. The spec lists the peers that may send requests. The operator, which reads the router's
    state, and Prometheus may use the admin port. Older routers serve the state on the request port, so the operator may
    use both ports.
    """
    operator, clients = _pods(MANAGER, settings.operator_namespace), service.spec.network_policy.ingress_from
    rules = [
        _rule(ROUTER_PORT, [*clients, operator]) if clients else _rule(ROUTER_PORT, ANY_PEER),
        _rule(ROUTER_ADMIN_PORT, [operator, *_scrapers(settings)]),
    ]
    engines = {"podSelector": {"matchLabels": engines_behind_router(service.name)}}
    own = [_to([engines], ENGINE_PORT), _to(ANY_PEER, *API_PORTS)]
    return _policy(service, ROUTER, selector={"matchLabels": router_selector(service.name)}, rules=rules, own=own)


def _engine_policy(service: InferenceService, settings: Settings) -> Manifest:
    """NetworkPolicy of engines: it admits only routers and Prometheus. Requests also need the router's secret."""
    routers = {"podSelector": {"matchLabels": router_selector(service.name)}}
    rules = [_rule(ENGINE_PORT, [routers, *_scrapers(settings)])]
    selector = {"matchLabels": engines_behind_router(service.name)}
    workers = {"podSelector": {"matchLabels": engines_behind_router(service.name, ENGINE_WORKER)}}
    return _policy(service, ENGINE, selector=selector, rules=rules, own=[{"to": [workers]}])


def _group_policy(service: InferenceService) -> Manifest:
    """NetworkPolicy that opens all ports between the pods of replicas, because ranks listen on random ports."""
    parts = [{"key": COMPONENT_LABEL, "operator": "In", "values": [ENGINE, ENGINE_WORKER]}]
    selector = {"matchLabels": {SERVICE_LABEL: service.name}, "matchExpressions": parts}
    peers = [{"podSelector": selector}]
    return _policy(service, ENGINE_GROUP, selector=selector, rules=[{"from": peers}], own=[{"to": peers}])


def _scrapers(settings: Settings) -> list[Manifest]:
    return [*(_pods("prometheus", name) for name in settings.scraped_from), *map(dict, settings.scrape_peers)]


def _pods(name: str, namespace: str) -> Manifest:
    """Peer for pods by namespace and app name. The app name alone is not enough: a pod of any namespace can have it."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
    }


def _rule(port: int, peers: list[Manifest] | None) -> Manifest:
    return drop_none({"from": peers, "ports": [{"port": port, "protocol": "TCP"}]})


def _to(peers: list[Manifest] | None, *ports: int) -> Manifest:
    return drop_none({"to": peers, "ports": [{"port": port, "protocol": "TCP"} for port in ports]})


def _policy(
    service: InferenceService,
    component: str,
    *,
    selector: Manifest,
    rules: list[Manifest],
    own: list[Manifest],
) -> Manifest:
    """`rules`: for incoming connections. `own`: for outgoing ones, besides DNS and the rules of the user."""
    peers = service.spec.network_policy.egress_to
    dns = {"ports": [{"port": port, "protocol": name} for port in DNS_PORTS for name in ("UDP", "TCP")]}
    egress = None if peers is None else [dns, *own, *([{"to": list(peers)}] if peers else [])]
    return child(
        service,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{service.name}-{component}",
        component=component,
        spec=drop_none(
            {
                "podSelector": selector,
                "policyTypes": ["Ingress", *([] if egress is None else ["Egress"])],
                "ingress": rules,
                "egress": egress,
            }
        ),
    )
