"""The children of a service: changes that make a new revision, labels and selectors, optional objects."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.cli import build_parser, settings_of
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.devices import unsupported_accelerators
from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.desired.network import exposed_url, internal_url
from octavo_operator.names import ENGINE_WORKER, REVISION_LABEL, engines_behind_router
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, HOST, KEYS, MINIMAL, OPEN, Case, stored

SETTINGS = Settings(
    engine_image="engine:1",
    router_image="router:1",
    operator_namespace="octavo-system",
    has_pod_monitors=True,
    has_gateway_api=True,
)


FLAGS = ("--engine-image=e", "--router-image=r", "--key-secret=k")


def _service(spec: dict[str, Any] | None = None, name: str = "llm") -> InferenceService:
    return read_service(stored(Case("", spec or {}, name=name)))


def _kinds(service: InferenceService) -> list[str]:
    return [f"{child['kind']}/{child['metadata']['name']}" for child in desired_children(service, SETTINGS)]


def _find(service: InferenceService, kind: str, name: str, settings: Settings = SETTINGS) -> dict[str, Any]:
    (found,) = [c for c in desired_children(service, settings) if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize(
    "live",
    [
        {"replicas": 5},
        {"exposure": HOST, "auth": KEYS},
        {"auth": OPEN},
        {"router": {"replicas": 3}},
        {"disruptionBudget": {"maxUnavailable": "50%"}},
        {"networkPolicy": {"enabled": False}},
    ],
    ids=str,
)
def test_changes_that_engines_do_not_read_keep_the_revision(live: dict[str, Any]) -> None:
    assert engine_revision(_service(live), SETTINGS) == engine_revision(_service(), SETTINGS)


@pytest.mark.parametrize(
    "read_at_start",
    [
        {"model": MINIMAL["model"] | {"servedNames": ["x"]}},
        {"engine": {"maxModelLen": 100}},
        {"engine": {"env": [{"name": "A", "value": "1"}]}},
        {"resources": {"limits": {"memory": "2Gi"}}},
        {"drain": {"timeoutSeconds": 5}},
        {"podMetadata": {"labels": {"team": "a"}}},
        {"router": {"ref": {"name": "other"}}},
        {"auth": KEYS | {"isolateTenants": False}},
    ],
    ids=str,
)
def test_changes_that_engines_read_make_a_new_revision(read_at_start: dict[str, Any]) -> None:
    assert engine_revision(_service(read_at_start), SETTINGS) != engine_revision(_service(), SETTINGS)


def test_a_new_image_of_the_installation_makes_a_new_revision() -> None:
    newer = replace(SETTINGS, engine_image="engine:2")
    assert engine_revision(_service(), newer) != engine_revision(_service(), SETTINGS)


def test_pods_have_the_pull_secrets_of_the_spec_and_of_the_installation() -> None:
    """An engine of a user's registry may have a router of the installation's registry."""
    settings = replace(SETTINGS, image_pull_secrets=("registry", "shared"))
    own = {"imagePullSecrets": [{"name": "own"}, {"name": "shared"}]}
    for spec, expected in (({}, ["registry", "shared"]), (own, ["own", "shared", "registry"])):
        router = next(c for c in desired_children(_service(spec), settings) if c["kind"] == "Deployment")
        for made in (router, desired_engine(_service(spec), settings, replicas=1)):
            assert made["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": name} for name in expected]
    assert "imagePullSecrets" not in desired_engine(_service(), SETTINGS, replicas=1)["spec"]["template"]["spec"]


def test_policies_admit_prometheus_of_configured_namespaces_only() -> None:
    def peers(settings: Settings, name: str) -> list[dict[str, Any]]:
        service = _service({"networkPolicy": {"ingressFrom": [{"podSelector": {}}]}})
        made = desired_children(service, settings)
        (policy,) = [c for c in made if (c["kind"], c["metadata"]["name"]) == ("NetworkPolicy", name)]
        return [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]

    for name in ("llm-engine", "llm-router"):
        alone, scraped = peers(SETTINGS, name), peers(replace(SETTINGS, scraped_from=("monitoring",)), name)
        (added,) = [peer for peer in scraped if peer not in alone]
        assert added["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
        assert added["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
        collector = {"ipBlock": {"cidr": "10.0.0.0/8"}}
        assert collector in peers(replace(SETTINGS, scrape_peers=(collector,)), name)


def test_a_platform_that_assigns_users_gets_pods_without_one() -> None:
    given = settings_of(build_parser().parse_args([*FLAGS, "--no-fixed-user"]))
    for settings, users in ((SETTINGS, {10001}), (replace(SETTINGS, has_fixed_user=given.has_fixed_user), set())):
        router = _find(_service(), "Deployment", "llm-router", settings)
        for made in (router, desired_engine(_service(), settings, replicas=1)):
            security = made["spec"]["template"]["spec"]["securityContext"]
            assert {security[name] for name in ("runAsUser", "runAsGroup", "fsGroup") if name in security} == users
            assert security["runAsNonRoot"] is True


def test_a_peer_that_scrapes_is_a_json_object() -> None:
    parse = build_parser().parse_args
    assert settings_of(parse([*FLAGS, '--scrape-peer={"ipBlock": {}}'])).scrape_peers == ({"ipBlock": {}},)
    with pytest.raises(SystemExit):
        parse([*FLAGS, "--scrape-peer=monitoring"])


def test_policies_admit_the_operator_from_its_namespace_only() -> None:
    """A pod of another namespace can have the operator's label, too."""
    service = _service({"networkPolicy": {"ingressFrom": [{"podSelector": {}}]}})
    peers = [peer for rule in _find(service, "NetworkPolicy", "llm-router")["spec"]["ingress"] for peer in rule["from"]]
    operators = [peer for peer in peers if "octavo-operator" in str(peer)]
    assert operators
    for peer in operators:
        assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "octavo-system"}}


def test_pods_connect_only_where_the_spec_says() -> None:
    peer, (router, engine) = {"ipBlock": {"cidr": "10.0.0.0/8"}}, ("llm-router", "llm-engine")

    def policy(name: str, **spec: Any) -> dict[str, Any]:
        found: dict[str, Any] = _find(_service({"networkPolicy": spec}), "NetworkPolicy", name)["spec"]
        return found

    for name in (router, engine):
        assert policy(name)["policyTypes"] == ["Ingress"]
        assert "egress" not in policy(name)
        opened, closed = policy(name, egressTo=[peer]), policy(name, egressTo=[])
        assert opened["policyTypes"] == closed["policyTypes"] == ["Ingress", "Egress"]
        assert opened["egress"] == [*closed["egress"], {"to": [peer]}]
        assert {port["port"] for port in closed["egress"][0]["ports"]} == {53, 5353}
    _, workers = policy(engine, egressTo=[])["egress"]
    assert workers == {"to": [{"podSelector": {"matchLabels": engines_behind_router("llm", ENGINE_WORKER)}}]}
    _, engines, api = policy(router, egressTo=[])["egress"]
    assert engines["to"] == [{"podSelector": policy(engine)["podSelector"]}]
    assert engines["ports"] == policy(engine)["ingress"][0]["ports"]
    assert ([port["port"] for port in api["ports"]], "to" in api) == ([443, 6443], False)


def test_pod_monitors_have_the_selected_labels_and_the_service_name() -> None:
    made = desired_children(_service(), replace(SETTINGS, monitor_labels={"release": "stack"}))
    monitors = [child for child in made if child["kind"] == "PodMonitor"]
    assert {monitor["metadata"]["labels"]["release"] for monitor in monitors} == {"stack"}
    (relabeling,) = monitors[0]["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_serving_octavo_dev_service"]


def test_a_deployment_selects_its_own_pods_only() -> None:
    made = desired_engine(_service(), SETTINGS, replicas=2)
    selector, template = made["spec"]["selector"]["matchLabels"], made["spec"]["template"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert selector[REVISION_LABEL] == engine_revision(_service(), SETTINGS)
    assert made["spec"]["replicas"] == 2


def test_labels_of_users_do_not_replace_the_operators() -> None:
    """The CRD refuses such labels, but an older CRD may have accepted them."""
    service = _service({"podMetadata": {"labels": {"team": "a"}}})
    pod_labels = desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["metadata"]["labels"]
    assert pod_labels["team"] == "a"
    assert pod_labels["serving.octavo.dev/service"] == "llm"


def test_a_service_on_a_shared_router_has_no_router() -> None:
    kinds = _kinds(_service({"router": {"ref": {"name": "other"}}}))
    assert kinds == [
        "ServiceAccount/llm-engine",
        "Service/llm",
        "PodDisruptionBudget/llm-engine",
        "PodMonitor/llm-engine",
    ]


def test_a_service_and_its_pods_use_the_shared_router() -> None:
    service = _service({"router": {"ref": {"name": "other"}}})
    front = _find(service, "Service", "llm")["spec"]["selector"]
    behind = _find(_service(name="other"), "Service", "other-engines")["spec"]["selector"]
    engine_labels = desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["metadata"]["labels"]
    router_labels = _find(_service(name="other"), "Deployment", "other-router")["spec"]["template"]["metadata"][
        "labels"
    ]
    assert front.items() <= router_labels.items()
    assert behind.items() <= engine_labels.items()


def test_keys_are_mounted_into_the_router_only() -> None:
    service = _service({"auth": KEYS})
    router = _find(service, "Deployment", "llm-router")["spec"]["template"]["spec"]
    assert {"name": "keys", "secret": {"secretName": "keys"}} in router["volumes"]
    assert any(arg.startswith("--api-key-file=") for arg in router["containers"][0]["args"])
    assert "keys" not in str(desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["spec"]["volumes"])


@pytest.mark.parametrize(
    ("limits", "given", "device"),
    [
        ({}, None, "cpu"),
        ({"nvidia.com/gpu": 1}, None, "cuda"),
        ({"nvidia.com/mig-1g.5gb": 1}, None, "cuda"),
        ({"amd.com/gpu": 1}, None, "cpu"),
        ({"nvidia.com/gpu": 1}, "cpu", "cpu"),
        ({}, "cuda", "cuda"),
    ],
    ids=str,
)
def test_engines_compute_on_the_device_that_the_pods_request(
    limits: dict[str, Any], given: str | None, device: str
) -> None:
    service = _service({"resources": {"limits": limits}, "engine": {} if given is None else {"device": given}})
    args = desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [arg for arg in args if arg.startswith("--device")] == [f"--device={device}"]
    assert bool(unsupported_accelerators(service)) == ("amd.com/gpu" in limits)


def test_a_users_variable_replaces_the_operators() -> None:
    spec = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}, "engine": {"env": [{"name": "HF_HOME", "value": "/tmp/hub"}]}}
    pod = desired_engine(_service(spec), SETTINGS, replicas=1)["spec"]["template"]["spec"]
    for container in (*pod["containers"], *pod["initContainers"]):
        assert [variable["value"] for variable in container["env"] if variable["name"] == "HF_HOME"] == ["/tmp/hub"]


@pytest.mark.parametrize(
    ("replicas", "allowed", "available"),
    [(4, None, 3), (1, None, 0), (0, None, 0), (4, 2, 2), (3, "50%", 1), (3, "0%", 3), (3, "100%", 0), (2, 5, 0)],
)
def test_the_budget_counts_wanted_replicas_of_all_revisions(
    replicas: int, allowed: int | str | None, available: int
) -> None:
    budget = {} if allowed is None else {"disruptionBudget": {"maxUnavailable": allowed}}
    spec = _find(_service({"replicas": replicas} | budget), "PodDisruptionBudget", "llm-engine")["spec"]
    assert (spec["minAvailable"], "maxUnavailable" in spec) == (available, False)
    assert REVISION_LABEL not in spec["selector"]["matchLabels"]
    for name in ("llm-engine", "llm-router"):
        policy = _find(_service(), "PodDisruptionBudget", name)["spec"]["unhealthyPodEvictionPolicy"]
        assert policy == "AlwaysAllow"


@pytest.mark.parametrize(("given", "mode"), [({}, "ReadWriteOnce"), ({"accessMode": "ReadWriteMany"}, "ReadWriteMany")])
def test_a_created_claim_has_the_given_or_default_access_mode(given: dict[str, Any], mode: str) -> None:
    cache = {"mode": "PVC", "size": "40Gi"} | given
    service = _service({"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": cache}})
    assert _find(service, "PersistentVolumeClaim", "llm-models")["spec"]["accessModes"] == [mode]


@pytest.mark.parametrize("uri", ["hf://a/b", "ms://a/b", "s3://b/m", "gs://b/m", "az://c/m", "azure://c/m"])
def test_remote_models_are_fetched_into_the_cache_before_the_engine_starts(uri: str) -> None:
    revision = {"revision": "v1"} if uri.startswith(("hf", "ms")) else {}
    service = _service({"model": {"uri": uri, "secretRef": {"name": "keys"}, **revision}})
    pod = desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["spec"]
    (fetch,), (engine,) = pod["initContainers"], pod["containers"]
    assert fetch["args"] == ["fetch", uri, *(["--revision", "v1"] if revision else [])]
    assert engine["args"][:2] == ["serve", uri]
    assert fetch["envFrom"] == engine["envFrom"] == [{"secretRef": {"name": "keys"}}]
    shared = {"name": "XDG_CACHE_HOME", "value": "/var/cache/octavo"}
    assert shared in fetch["env"]
    assert shared in engine["env"]


def test_a_claim_is_mounted_and_nothing_is_fetched() -> None:
    pod = desired_engine(_service({"model": {"uri": "pvc://models/a/b"}}), SETTINGS, replicas=1)["spec"]["template"][
        "spec"
    ]
    assert pod["containers"][0]["args"][:2] == ["serve", "/models/a/b"]
    assert "initContainers" not in pod


def test_known_ingress_classes_get_annotations_for_streaming() -> None:
    annotations = {"nginx.ingress.kubernetes.io/proxy-body-size": "1m"}
    wanted = {"host": "a.b", "ingressClassName": "nginx", "annotations": annotations}
    annotations = _find(_service({"exposure": {"ingress": wanted}, "auth": OPEN}), "Ingress", "llm")["metadata"][
        "annotations"
    ]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == "1m"


def test_pods_end_soon_enough_for_their_namespace_to_go_within_a_minute() -> None:
    """Kubernetes checks a terminating namespace after 5 s, 10 s, and half of its pods' longest grace period."""
    service = _service()
    pods = (desired_engine(service, SETTINGS, replicas=1), _find(service, "Deployment", "llm-router"))
    longest_s = max(pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for pod in pods)
    assert 5 + 5 + longest_s // 2 + 1 < 45


@pytest.mark.parametrize(
    ("exposure", "url", "flag"),
    [
        ({"ingress": {"host": "a.b", "path": "/x/", "tlsSecretName": "t"}}, "https://a.b/x", "--root-path=/x"),
        ({"ingress": {"host": "a.b", "path": "/v1"}}, "http://a.b", None),
        ({"ingress": {"host": "a.b", "path": "/x/v1"}}, "http://a.b/x", "--root-path=/x"),
        ({"ingress": {"host": "*.a.b"}}, None, None),
        ({"gateway": {"parentRefs": [{"name": "g"}], "hostnames": ["*.b", "a.b"]}}, "http://a.b", None),
        ({"gateway": {"parentRefs": [{"name": "g"}], "hostnames": ["a.b"], "scheme": "https"}}, "https://a.b", None),
        ({"gateway": {"parentRefs": [{"name": "g"}]}}, None, None),
    ],
    ids=str,
)
def test_the_router_removes_the_path_of_the_url(exposure: dict[str, Any], url: str | None, flag: str | None) -> None:
    service = _service({"exposure": exposure, "auth": OPEN})
    args = _find(service, "Deployment", "llm-router")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert exposed_url(service) == url
    assert [arg for arg in args if arg.startswith("--root-path")] == ([] if flag is None else [flag])


def test_an_unexposed_service_has_an_internal_url() -> None:
    assert exposed_url(_service()) is None
    assert internal_url(_service(), SETTINGS) == "http://llm.default.svc.cluster.local"


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_every_child_has_owner_labels_and_a_short_name(case: Case) -> None:
    service = read_service(stored(case))
    for made in [*desired_children(service, SETTINGS), desired_engine(service, SETTINGS, replicas=1)]:
        is_retained = case.id == "retained cache" and made["kind"] == "PersistentVolumeClaim"
        assert made["metadata"].get("ownerReferences", []) == ([] if is_retained else [service.owner])
        assert made["metadata"]["labels"]["serving.octavo.dev/service"] == service.name
        assert len(made["metadata"]["name"]) <= 63
