"""A real API server accepts the chart's objects for a change of each value; the schema refuses wrong values."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from octavo_operator.cli import build_parser
from octavo_testing.chart import (
    CHART,
    HELM_MISSING,
    SettingChange,
    default_values,
    helm_binary,
    render,
    run_helm,
    setting_changes,
    settings,
    value_at,
    values_schema,
)

pytestmark = pytest.mark.skipif(helm_binary() is None, reason=HELM_MISSING)

ACCEPTED: set[str] = set()  # objects as JSON
#: Values that have an effect only together with other values.
ALL_ON: dict[str, Any] = {
    "monitoring": {"podMonitors": True, "rules": True, "dashboards": {"enabled": True}},
    "gatewayApi": {"enabled": True},
}

WRONG = (
    ({"operator": {"replicas": "two"}}, "got string, want integer"),
    ({"operator": {"replicas": -1}}, "minimum: got -1, want 0"),
    ({"operator": {"workers": 0}}, "minimum: got 0, want 1"),
    ({"operator": {"logFormat": "xml"}}, "value must be one of 'json', 'text'"),
    ({"operator": {"image": "x"}}, "additional properties 'image' not allowed"),
    ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, "'/operator/resources/limits/memory'"),
    ({"operator": {"podLabels": {"a": 1}}}, "'/operator/podLabels/a': got number, want string"),
    ({"images": {"registry": ""}}, "'/images/registry': minLength: got 0, want 1"),
    ({"images": {"pullSecrets": ["registry"]}}, "'/images/pullSecrets/0': got string, want object"),
    ({"images": {"pullPolicy": "Sometimes"}}, "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ({"watchNamespaces": "default"}, "'/watchNamespaces': got string, want array"),
    ({"watchNamespaces": ["Default"]}, "does not match pattern"),
    ({"watchNamespaces": ["a", "a"]}, "items at 0 and 1 are equal"),
    ({"crds": {"install": "yes"}}, "got string, want boolean"),
    ({"crd": {}}, "additional properties 'crd' not allowed"),
)


@pytest.fixture(scope="module")
def objects(api: client.ApiClient) -> DynamicClient:
    return DynamicClient(api)


def test_helm_lint_has_no_warnings() -> None:
    linted = run_helm("lint", "--strict", str(CHART), values=ALL_ON)
    assert linted.returncode == 0, linted.stdout
    assert "WARNING" not in linted.stdout


@pytest.mark.parametrize(("values", "says"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_a_wrong_value_is_refused_with_its_name(values: Mapping[str, Any], says: str) -> None:
    refused = run_helm("template", "octavo", str(CHART), values=values)
    assert refused.returncode != 0
    assert says in refused.stderr


def test_the_dry_run_refuses_an_unknown_field(objects: DynamicClient, namespace: str) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a", "namespace": namespace}}
    with pytest.raises(ApiException, match="unknownField"):
        _dry_run(objects, [account | {"unknownField": 1}])


def test_pods_meet_the_restricted_standard(objects: DynamicClient, strict_namespace: str) -> None:
    made = render({}, namespace=strict_namespace)
    (deployment,) = [m for m in made if m["kind"] == "Deployment"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator", "namespace": strict_namespace}}
    _dry_run(
        objects, [*(m for m in made if m["kind"] == "Pod"), pod | {"spec": deployment["spec"]["template"]["spec"]}]
    )


def test_no_pod_of_the_chart_names_a_user_where_the_platform_assigns_them() -> None:
    pods = [made for made in render({"fixedUser": False}) if made["kind"] in ("Deployment", "Pod")]
    assert len(pods) > 1
    assert [word for word in ("runAsUser", "runAsGroup", "fsGroup") if word in str(pods)] == []
    assert "--no-fixed-user" in str(pods)


def test_the_api_server_accepts_the_default_chart(objects: DynamicClient, namespace: str) -> None:
    _dry_run(objects, render({}, namespace=namespace))


@pytest.fixture(scope="module")
def bases(namespace: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Values, and the objects that helm renders from them."""
    values = default_values()
    everything = _merged(values, ALL_ON)
    return [(base, render(base, namespace=namespace)) for base in (values, everything)]


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(values[name], new) for name, new in more.items() if isinstance(new, dict)}
    return values | more | both


@pytest.mark.parametrize("flip", setting_changes(), ids=lambda flip: flip.id)
def test_every_value_has_an_effect_that_the_server_accepts(
    objects: DynamicClient,
    namespace: str,
    flip: SettingChange,
    bases: list[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    made = [render(flip.apply_to(values), namespace=namespace) for values, _ in bases]
    assert made != [manifests for _, manifests in bases], "the value has no effect"
    for manifests in made:
        _dry_run(objects, manifests)


def _paths(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of everything in the chart's values: groups, settings, and items of maps."""
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from _paths(value, (*above, name))


#: Settings whose default is neither a list nor a map.
SCALARS = [
    path for path, _ in settings(values_schema()) if not isinstance(value_at(default_values(), path), dict | list)
]


@pytest.mark.parametrize("path", list(_paths(default_values())), ids=".".join)
def test_every_value_may_be_null(
    objects: DynamicClient,
    namespace: str,
    path: tuple[str, ...],
    bases: list[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    """Helm removes such a value. A setting has its default then; a list or map is empty."""
    for base, manifests in bases:
        made = render(SettingChange(path, None).apply_to(base), namespace=namespace)
        assert [word for word in ("<nil>", "no value") if word in str(made)] == []
        _dry_run(objects, made)
        (deployment,) = [each for each in made if each["kind"] == "Deployment"]
        args = build_parser().parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
        assert args.pod_templates == "restricted"
        if path in SCALARS and value_at(base, path) == value_at(default_values(), path):
            assert made == manifests


@pytest.mark.parametrize("name", ["POD_NAME", "POD_NAMESPACE"])
def test_a_variable_of_the_chart_is_not_doubled(objects: DynamicClient, namespace: str, name: str) -> None:
    """Operators with one name in common would all lead."""
    env = [{"name": "A", "value": "1"}, {"name": name, "value": "x"}, {"name": "B", "value": "$(A): 2"}]
    made = render({"operator": {"env": env}}, namespace=namespace)
    _dry_run(objects, made)
    (deployment,) = [each for each in made if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["POD_NAME", "POD_NAMESPACE", "A", "B"]
    assert [variable.get("value") for variable in container["env"]] == [None, None, "1", "$(A): 2"]


def test_only_collectors_and_the_api_server_reach_the_operator() -> None:
    def ingress(**values: Any) -> list[dict[str, Any]]:
        (policy,) = [made for made in render(values) if made["kind"] == "NetworkPolicy"]
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        rules: list[dict[str, Any]] = policy["spec"]["ingress"] or []
        return rules

    peer = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    assert ingress() == [{"ports": [{"port": "metrics-api"}]}]
    assert ingress(metricsApi={"enabled": False}) == []
    team, other, _ = ingress(monitoring={"scrapeNamespaces": ["team"], "scrapePeers": [peer]})
    assert team["from"][0]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "team"}}
    assert team["from"][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    assert (other["from"], other["ports"], team["ports"]) == ([peer], [{"port": "http"}], [{"port": "http"}])
    assert [made for made in render({"networkPolicy": {"enabled": False}}) if made["kind"] == "NetworkPolicy"] == []


def _dry_run(objects: DynamicClient, manifests: list[dict[str, Any]]) -> None:
    """Apply in a dry run on the server, which refuses unknown fields; an object that it has accepted only once."""
    for made in manifests:
        if made["apiVersion"].startswith("monitoring.coreos.com/") or (text := json.dumps(made)) in ACCEPTED:
            continue
        kind = objects.resources.get(api_version=made["apiVersion"], kind=made["kind"])
        if made["kind"] == "Pod":  # admission requires the account, which a dry run does not create
            made = made | {"spec": {k: v for k, v in made["spec"].items() if k != "serviceAccountName"}}
        answer = kind.server_side_apply(
            made, field_manager="octavo-tests", dry_run="All", field_validation="Strict", force_conflicts=True
        )
        assert answer.metadata.name == made["metadata"]["name"]
        ACCEPTED.add(text)


@pytest.mark.parametrize(
    ("images", "name"),
    [
        ({}, "localhost/octavo/engine:0.1.0"),
        ({"registry": "r.test:5000/team"}, "r.test:5000/team/engine:0.1.0"),
        ({"registry": "r.test", "tag": "9"}, "r.test/engine:9"),
        ({"tag": "9", "engine": "r.test/x@sha256:abc"}, "r.test/x@sha256:abc"),
    ],
)
def test_images_are_named_by_registry_and_version(images: dict[str, Any], name: str) -> None:
    (deployment,) = [made for made in render({"images": images}) if made["kind"] == "Deployment"]
    assert f"--engine-image={name}" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
