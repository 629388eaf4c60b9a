"""Names and labels of the objects that belong to a service.

A service has a *router*: its own or another service's, which it shares. Engine pods carry the router's name as a label,
so one headless Service per router selects the engines of all services that the router serves.
"""

from octavo_operator.spec.service import GROUP

MANAGER = "octavo-operator"
SERVICE_LABEL = f"{GROUP}/service"
ROUTER_LABEL = f"{GROUP}/router"
REVISION_LABEL = f"{GROUP}/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
ADMITTED_GATE = f"{GROUP}/router-admitted"
ADAPTER_LIST = f"{GROUP}/adapter-list"  # annotation of a pod: digest of the list of adapters that it shall follow
DRAINING = "Draining"  # reason of the gate's condition
ADMITTED_EPOCH = f"{GROUP}/admitted-epoch"  # annotation of a pod: the epoch that its open gate belongs to

APPLIED = f"{GROUP}/applied"  # annotation of a child: digest of the manifest that was applied
TEMPLATE = f"{GROUP}/template"  # annotation of a router's Deployment: revision of its pod template

ENGINE_PORT = 8000
ROUTER_PORT = 8080
ROUTER_ADMIN_PORT = 8001
SERVICE_PORT = 80
#: Names of container ports. A router's admin port has the metrics, state and debug routes; no Service exposes it.
HTTP, ADMIN = "http", "admin"

ENGINE, ROUTER = "engine", "router"
#: Component label of the pods of a replica except its first one, which answers requests for all of them.
ENGINE_WORKER = "engine-worker"
#: Component of the objects of all pods of replicas that have several.
ENGINE_GROUP = "engine-group"
#: Kinds of the object that holds the replicas of one revision; a replica is a pod, or a group of pods.
DEPLOYMENT, GROUP_SET = "Deployment", "LeaderWorkerSet"

#: Metrics of a service in the API custom.metrics.k8s.io, by their type in spec.autoscaling.
METRIC_NAMES = {"KVUtilization": "kv_used_replicas", "WaitingRequests": "waiting_requests"}


def engine_deployment(service: str, revision: str) -> str:
    return f"{service}-engine-{revision}"


def engine_group_set(service: str, revision: str) -> str:
    """Name of a LeaderWorkerSet. It has at most 49 characters: Kubernetes' names of its pods add up to 14 more."""
    return f"{service}-{revision}"


def router_deployment(router: str) -> str:
    return f"{router}-router"


def engines_service(router: str) -> str:
    """Name of the headless Service by which the router discovers engine pods, unready ones included."""
    return f"{router}-engines"


def router_secret(router: str) -> str:
    """Name of the Secret by which router and engines authenticate each other."""
    return f"{router}-router-secret"


def router_admin_secret(router: str) -> str:
    """Name of the Secret by which the operator authenticates to the router."""
    return f"{router}-router-admin-secret"


def group_secret(service: str) -> str:
    """Name of the Secret by which the pods of one replica authenticate each other."""
    return f"{service}-group-secret"


def services_config(router: str) -> str:
    """Name of the ConfigMap with the services behind the router and their models."""
    return f"{router}-router"


def adapters_config(service: str) -> str:
    """Name of the ConfigMap with the list of adapters that the engines follow."""
    return f"{service}-adapters"


def router_account(router: str) -> str:
    return f"{router}-router"


def engine_account(service: str) -> str:
    return f"{service}-engine"


def cache_claim(service: str) -> str:
    return f"{service}-models"


def labels(service: str, component: str) -> dict[str, str]:
    """Labels of every object made for a service."""
    return {
        "app.kubernetes.io/name": f"octavo-{component}",
        "app.kubernetes.io/instance": service,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/part-of": "octavo",
        SERVICE_LABEL: service,
    }


def engine_selector(service: str) -> dict[str, str]:
    return {SERVICE_LABEL: service, COMPONENT_LABEL: ENGINE}


def engines_behind_router(router: str, component: str = ENGINE) -> dict[str, str]:
    """Selector of the engine pods, or of another component, of all services behind a router."""
    return {ROUTER_LABEL: router, COMPONENT_LABEL: component}


def router_selector(router: str) -> dict[str, str]:
    return {ROUTER_LABEL: router, COMPONENT_LABEL: ROUTER}
