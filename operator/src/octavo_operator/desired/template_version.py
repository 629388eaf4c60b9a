"""Versions of pod templates: they let an upgrade of the operator replace no pods.

Each kind of pod has a table of versions, from number to the function that renders a template. To write another template
for the same service and settings, add a version; the older ones stay. A Deployment keeps its version until the service
or a setting, such as the default image, changes. Then no version renders the template that it has, so the newest one is
rolled out. Tests compare each version with the hashes in a golden file.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from octavo_operator.desired.objects import Manifest
from octavo_operator.service import InferenceService, Settings

REVISION_CHARS = 8
Versions = Mapping[int, Callable[[InferenceService, Settings], Manifest]]


@dataclass(frozen=True, slots=True)
class RenderedTemplate:
    revision: str  # hash of the content
    content: Manifest


def choose_template(
    versions: Versions, service: InferenceService, settings: Settings, live: Collection[str]
) -> RenderedTemplate:
    """The newest version whose template is live, otherwise the newest version. `live`: revisions of Deployments."""
    templates = [_with_revision(versions[number](service, settings)) for number in sorted(versions, reverse=True)]
    return next((template for template in templates if template.revision in live), templates[0])


def _with_revision(content: Manifest) -> RenderedTemplate:
    text = json.dumps(content, sort_keys=True)
    return RenderedTemplate(hashlib.sha256(text.encode()).hexdigest()[:REVISION_CHARS], content)
