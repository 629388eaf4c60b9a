"""The spec's models: the same fields, bounds and rules as the CRD's schema."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo_operator.spec.access import ROUTER_FLAGS
from octavo_operator.spec.engine import FLAG, RESERVED_FLAGS
from octavo_operator.spec.fields import num_bytes
from octavo_operator.spec.model import FORMS, NO_FLAG, TOKENIZER_PATTERN, URI_PATTERN
from octavo_operator.spec.quantity import QUANTITY_PATTERN
from octavo_operator.spec.service import InferenceServiceSpec, InvalidSpec, read_spec
from octavo_testing.infsvc_cases import ACCEPTED, REFUSED, Case

CRD = Path(__file__).parents[3] / "crds" / "inferenceservices.serving.octavo.dev.yaml"

#: The keywords of JSON schema that both sides have; keywords of the CRD alone are not compared.
WORDS = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CRD.read_text())
    return loaded


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_a_valid_spec_is_read(case: Case) -> None:
    assert read_spec(case.manifest()).model.uri == case.manifest()["spec"]["model"]["uri"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_an_invalid_spec_is_refused_with_the_remedy(case: Case) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        read_spec(case.manifest())
    assert case.message in str(refusal.value)


def test_the_models_have_the_fields_and_bounds_of_the_crd(crd: dict[str, Any]) -> None:
    schema = InferenceServiceSpec.model_json_schema(by_alias=True)
    spec = _spec_schema(crd)
    assert _shape(schema, schema.get("$defs", {})) == _shape(spec, {})


@pytest.mark.parametrize(("part", "flags"), [("engine", RESERVED_FLAGS), ("router", ROUTER_FLAGS)])
def test_the_crd_reserves_the_same_flags(crd: dict[str, Any], part: str, flags: str) -> None:
    rules = [rule["rule"] for rule in _spec_schema(crd)["properties"][part]["x-kubernetes-validations"]]
    assert any(f".matches('^({flags})(=|$)')" in rule for rule in rules)


def test_every_field_has_a_description(crd: dict[str, Any]) -> None:
    """`kubectl explain` shows the descriptions; columns need one, too."""
    (version,) = crd["spec"]["versions"]
    fields = _fields(version["schema"]["openAPIV3Schema"])
    assert len(fields) > 140
    assert [path for path, field in fields if not field.get("description")] == [".metadata"]  # Kubernetes does that
    assert [column["name"] for column in version["additionalPrinterColumns"] if not column.get("description")] == []


def test_a_schema_has_only_keywords_of_kubernetes(crd: dict[str, Any]) -> None:
    """The API server refuses a whole CRD for one key more, such as the rest of a text without quotes after a comma."""
    (version,) = crd["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]
    fields = [("", root), *_fields(root)]
    unknown = [(path, key) for path, field in fields for key in field if " " in key or field[key] is None]
    assert unknown == []


def test_the_chart_has_the_same_crd(crd: dict[str, Any]) -> None:
    copy = CRD.parents[1] / "charts" / "octavo" / "files" / CRD.name
    assert copy.read_text() == CRD.read_text(), "run make crds"


def test_models_and_crd_have_the_same_messages(crd: dict[str, Any]) -> None:
    """A manifest gets the same messages on one machine and in a cluster."""
    source = "".join(path.read_text() for path in sorted((CRD.parents[1] / "operator").rglob("spec/*.py")))
    written = "".join(source.replace('"\n', "").replace('f"', '"').split('"'))
    words = " ".join(written.split())
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    messages = [rule["message"] for rule in _rules(root) if "oldSelf" not in rule["rule"]]
    assert len(messages) > 20
    missing = [m for m in messages if " ".join(m.split()) not in words.replace("{MAX_NAME_CHARS}", "40")]
    assert missing == []


@pytest.mark.parametrize(
    ("quantity", "expected"), [("5", 5), ("1.5Gi", 3 * 2**29), ("2k", 2000), ("3M", 3_000_000), ("1Ki", 1024)]
)
def test_quantities_are_bytes(quantity: str, expected: int) -> None:
    assert num_bytes(quantity) == expected


def test_fields_of_an_existing_claim_have_a_rule_for_edits(crd: dict[str, Any]) -> None:
    """tests/cluster/test_crd_rules.py tries the rules. Models see no earlier spec."""
    cache = _spec_schema(crd)["properties"]["model"]["properties"]["cache"]
    rules = [rule["message"].split()[0] for rule in cache["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    assert rules == ["cache.size", "cache.accessMode", "cache.storageClassName"]


def test_the_crd_has_the_pattern_of_quantities(crd: dict[str, Any]) -> None:
    limits = _spec_schema(crd)["properties"]["resources"]["properties"]["limits"]["additionalProperties"]
    assert limits["pattern"] == QUANTITY_PATTERN


def test_the_crd_has_the_patterns_of_locations(crd: dict[str, Any]) -> None:
    spec = _spec_schema(crd)["properties"]
    model, adapter = spec["model"]["properties"], spec["adapters"]["items"]["properties"]
    fields = ((model["uri"], URI_PATTERN), (model["tokenizer"], TOKENIZER_PATTERN), (adapter["uri"], URI_PATTERN))
    for field, pattern in fields:
        assert "pattern" not in field, "the API server would show the pattern, not its meaning"
        (rule,) = field["x-kubernetes-validations"]
        assert rule == {"rule": f"self.matches(r'{pattern}')", "message": FORMS[pattern]}


def test_the_crd_refuses_flags_where_texts_are_arguments(crd: dict[str, Any]) -> None:
    spec = _spec_schema(crd)["properties"]
    model = spec["model"]["properties"]
    for field in (model["servedNames"]["items"], model["revision"]):
        rule = {"rule": "!self.startsWith('-')", "message": FORMS[NO_FLAG]}
        assert field["x-kubernetes-validations"] == [rule]
    for part in ("engine", "router"):
        rules = [rule["rule"] for rule in spec[part]["x-kubernetes-validations"]]
        assert f"!has(self.extraArgs) || self.extraArgs.all(a, a.matches('{FLAG}'))" in rules


def _spec_schema(crd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def _shape(schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """The compared keywords of a schema, in one form for both sources."""
    schema = _plain(schema, defs)
    if "properties" in schema:
        fields = {name: _shape(field, defs) for name, field in schema["properties"].items()}
        return {"fields": fields, "required": sorted(schema.get("required", []))}
    shape = {word: schema[word] for word in WORDS if word in schema}
    if schema.get("x-kubernetes-int-or-string") or len(schema.get("anyOf", ())) == 2:
        return "int or string"
    if isinstance(schema.get("items"), dict):
        shape["items"] = _shape(schema["items"], defs)
    elif isinstance(schema.get("additionalProperties"), dict):
        shape["values"] = _shape(schema["additionalProperties"], defs)
    return shape


def _plain(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The schema without pydantic's references and without the null type of optional fields."""
    if "$ref" in schema:
        return _plain(defs[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}, defs)
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        return _plain(choices[0], defs)
    return schema | {"anyOf": choices} if choices else schema


def _fields(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """All fields with their paths, those of list items included."""
    below = schema.get("properties", {}) | schema.get("items", {}).get("properties", {})
    return [
        found
        for name, field in below.items()
        for found in ((f"{path}.{name}", field), *_fields(field, f"{path}.{name}"))
    ]


def _rules(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = list(schema.get("x-kubernetes-validations", ()))
    for field in schema.get("properties", {}).values():
        found += _rules(field)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            found += _rules(inner)
    return found
