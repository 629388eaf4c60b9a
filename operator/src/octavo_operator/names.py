"""Names of what a service consists of, and the labels by which its parts find each other.

A service has a *router*: its own, or that of the service that it shares one with. Engine pods carry the router's name,
so one headless Service per router holds the engines of all services behind it.
"""

from octavo_operator.spec.service import GROUP

MANAGER = "octavo-operator"
SERVICE_LABEL = f"{GROUP}/service"
ROUTER_LABEL = f"{GROUP}/router"
REVISION_LABEL = f"{GROUP}/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
ADMITTED_GATE = f"{GROUP}/router-admitted"

ENGINE_PORT = 8000
ROUTER_PORT = 8080
ROUTER_ADMIN_PORT = 8001
SERVICE_PORT = 80
#: Container ports by name. The admin port has metrics, state and debug routes; no Service leads to it.
HTTP, ADMIN = "http", "admin"

ENGINE, ROUTER = "engine", "router"


def engine_deployment(service: str, revision: str) -> str:
    return f"{service}-engine-{revision}"


def router_deployment(router: str) -> str:
    return f"{router}-router"


def engines_service(router: str) -> str:
    """Headless: the router looks up engine pods by it, those not ready yet included."""
    return f"{router}-engines"


def router_secret(router: str) -> str:
    """What router and engines know each other by."""
    return f"{router}-router-secret"


def router_account(router: str) -> str:
    return f"{router}-router"


def engine_account(service: str) -> str:
    return f"{service}-engine"


def cache_claim(service: str) -> str:
    return f"{service}-models"


def labels(service: str, component: str) -> dict[str, str]:
    """Of every object made for a service."""
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


def engines_behind_router(router: str) -> dict[str, str]:
    """Engine pods of all services behind a router."""
    return {ROUTER_LABEL: router, COMPONENT_LABEL: ENGINE}


def router_selector(router: str) -> dict[str, str]:
    return {ROUTER_LABEL: router, COMPONENT_LABEL: ROUTER}
