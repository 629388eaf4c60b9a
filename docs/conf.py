"""Sphinx configuration of the documentation: `make docs` builds docs/_build/html.

The order of pages comes from the links of README.md. The references of command line, Python API, metrics and
InferenceService are generated from the code and crds/ during the build.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from octavo_engine.wire.metrics import active_metrics
from octavo_server.router.observe.metrics.catalogue import FAMILIES, PREFIX
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]

project = "Octavo"
author = copyright = "the Octavo authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxarg.ext"]
root_doc = "README"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Octavo"
html_copy_source = False
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # pages in tables of contents keep their own heading levels

#: Pages of the site whose text is a file outside docs/.
INCLUDED = {"internals/architecture": "ARCHITECTURE.md", "internals/contributing": "CONTRIBUTING.md"}
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)([\w./-]+\.md)(#[\w-]+)?\)")
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
PAGE = re.compile(r"^\d+\. .*?\]\(/([^)#]+)\.md\)", re.MULTILINE)


class MarkdownDirective(SphinxDirective):
    """Insert generated lines of Markdown, headings included."""

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        section = nodes.section()
        section.document = self.state.document
        self.state.nested_parse(StringList(list(self.lines()), source=self.name), 0, section, match_titles=True)
        return section.children


class MetricTable(MarkdownDirective):
    """A table of the metrics of `engine` or `router`."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        yield from ("| name | type | labels or buckets | meaning |", "|---|---|---|---|")
        yield from {"engine": engine_metrics, "router": router_metrics}[self.arguments[0]]()


def engine_metrics() -> Iterator[str]:
    for metric in active_metrics(frozenset({"kv_cache_metrics", "spec_decode"})):
        suffix = "_total" if metric.kind == "counter" else ""
        flag = {"kv_cache_metrics": "--kv-cache-metrics", "spec_decode": "--speculative-config"}.get(metric.feature)
        only = f" Only with `{flag}`." if flag else ""
        yield metric_row(
            [name + suffix for name in metric.exposed_names()],
            metric.kind,
            metric.labels,
            metric.buckets,
            metric.help + only,
        )


def router_metrics() -> Iterator[str]:
    for family in FAMILIES:
        yield metric_row([PREFIX + family.name], family.kind, family.labels, family.bounds, family.help)


def metric_row(names: Sequence[str], kind: str, labels: Sequence[str], bounds: Sequence[float], meaning: str) -> str:
    details = ", ".join(labels) or " ".join(f"{bound:g}" for bound in bounds)
    return f"| {', '.join(f'`{name}`' for name in names)} | {kind} | {details} | {meaning} |"


class InferenceServiceFields(MarkdownDirective):
    """One table for each object of the CRD's schema, with the names, types and descriptions of its fields."""

    def lines(self) -> Iterator[str]:
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            self.env.note_dependency(str(path))
            for version in yaml.safe_load(path.read_text())["spec"]["versions"]:
                schema = version["schema"]["openAPIV3Schema"]["properties"]
                for name in ("spec", "status"):
                    yield from field_tables(name, schema[name])


def field_tables(path: str, schema: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown: the table of `schema`, then those of the objects in it."""
    yield from (f"## `{path}`", "", "| field | type | description |", "|---|---|---|")
    inner = []
    for name, field in schema["properties"].items():
        item = field.get("items", field)
        yield f"| `{name}` | {type_name(field)} | {cell(field)} |"
        if "properties" in item:
            inner.append((f"{path}.{name}" + "[]" * (item is not field), item))
    yield ""
    for inner_path, item in inner:
        yield from field_tables(inner_path, item)


def type_name(field: dict[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in field:
        return f"list of {type_name(field['items'])}"
    if isinstance(values := field.get("additionalProperties"), dict):
        return f"map to {type_name(values)}"
    return str(field.get("type", "any"))


def cell(field: dict[str, Any]) -> str:
    parts = [" ".join(field.get("description", "").split())]
    if "enum" in field:
        parts.append("One of " + ", ".join(f"`{json.dumps(value)}`" for value in field["enum"]) + ".")
    bounds = [f"{word} {field[key]}" for key, word in (("minimum", "at least"), ("maximum", "at most")) if key in field]
    if bounds:
        parts.append(" and ".join(bounds).capitalize() + ".")
    if "default" in field:
        parts.append(f"Default: `{json.dumps(field['default'])}`.")
    return " ".join(filter(None, parts)).replace("|", "\\|")


def adapt_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Insert included files, make links fit the site, and build the tables of contents from README.md's lists."""
    folder = (ROOT / "docs" / docname).parent
    if docname in INCLUDED:
        path = ROOT / INCLUDED[docname]
        app.env.note_dependency(str(path))
        source[0], folder = path.read_text(), ROOT
    source[0] = LINK.sub(lambda link: site_link(link, folder), source[0])
    if docname == root_doc:
        source[0] += "".join(tables_of_contents(source[0]))


def site_link(link: re.Match[str], folder: Path) -> str:
    """A link to a Markdown file as a link within the site, or as plain text if the site doesn't contain the file."""
    text, up, name, anchor = link.groups()
    path = (folder / (up + name)).resolve().relative_to(ROOT)
    pages = {target: page for page, target in INCLUDED.items()}
    if str(path) in pages:
        return f"[{text}](/{pages[str(path)]}.md{anchor or ''})"
    if path.parts[0] == "docs":
        return f"[{text}](/{path.relative_to('docs')}{anchor or ''})"
    return f"{text} (`{path}`)"


def tables_of_contents(text: str) -> Iterator[str]:
    _, *sections = SECTION.split(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(PAGE.findall(body)) + "\n```\n"


def setup(app: Sphinx) -> None:
    app.add_directive("metrics", MetricTable)
    app.add_directive("inferenceservice", InferenceServiceFields)
    app.connect("source-read", adapt_source)
