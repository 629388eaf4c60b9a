"""`newer_templates`: the operator as its next version might be, which writes another template into all pods."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from octavo_operator.desired import engine, router
from octavo_operator.desired.objects import Manifest
from octavo_operator.service import InferenceService, Settings

ADDED = "ADDED_BY_AN_UPGRADE"  # a variable of the main container in the newer templates


@contextmanager
def newer_templates() -> Iterator[None]:
    tables: Any = (engine.TEMPLATES, engine.GROUPS, router.TEMPLATES)
    with ExitStack() as patches:
        for versions in tables:
            newest = max(versions)
            patches.enter_context(mock.patch.dict(versions, {newest + 1: _with_variable(versions[newest])}))
        yield


def _with_variable(render: Any) -> Any:
    def made(service: InferenceService, settings: Settings) -> Manifest:
        template: Manifest = render(service, settings)
        for each in template.get("templates", {"": template}).values():
            container = each["spec"]["containers"][0]
            container["env"] = [*container.get("env", ()), {"name": ADDED, "value": "1"}]
        return template

    return made
