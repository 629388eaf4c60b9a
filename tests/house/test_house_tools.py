"""The scripts in `tools/`: the source of torch, and the rules of size and layout that `make lint` enforces."""

import importlib.util
import sys
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError, URLError
from urllib.parse import unquote
from urllib.request import urlopen

import pytest
from octavo_testing.run_length import LONG

ROOT = Path(__file__).parents[2]
PIN = "torch==2.13.0"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


install_torch, size_report, check_layout = tool("install_torch"), tool("size_report"), tool("check_layout")
CPU, CUDA = install_torch.CPU_INDEX, install_torch.CUDA_INDEX


@pytest.mark.parametrize(
    ("settings", "nvidia", "local_wheel", "expected"),
    [
        pytest.param({}, False, True, ["--no-index", PIN], id="a local wheel"),
        pytest.param({}, False, False, ["--index-url", CPU, PIN], id="the CPU index"),
        pytest.param({}, True, False, [PIN], id="NVIDIA"),
        pytest.param({"TORCH_INDEX": "https://x"}, False, True, ["--index-url", "https://x", PIN], id="TORCH_INDEX"),
        pytest.param({"TORCH_SPEC": "t.whl"}, True, True, ["t.whl"], id="TORCH_SPEC"),
        pytest.param({"TORCH_SPEC": "t", "TORCH_INDEX": "u"}, False, True, ["--index-url", "u", "t"], id="both"),
        pytest.param({"TORCH_SPEC": "", "TORCH_INDEX": ""}, True, True, [PIN], id="empty means unset"),
        pytest.param({"ENGINE_TARGET": "cuda"}, False, True, ["--index-url", CUDA, PIN], id="a CUDA image"),
        pytest.param({"ENGINE_TARGET": "cpu"}, False, False, ["--index-url", CPU, PIN], id="a CPU image"),
        pytest.param({"ENGINE_TARGET": "cuda", "TORCH_INDEX": "u"}, False, True, ["--index-url", "u", PIN], id="other"),
    ],
)
def test_settings_choose_the_source_of_torch(
    settings: dict[str, str], nvidia: bool, local_wheel: bool, expected: list[str]
) -> None:
    _, arguments = install_torch.choose(settings, PIN, nvidia=nvidia, pip=lambda _: 0 if local_wheel else 1)
    assert arguments == expected


@pytest.mark.parametrize(
    ("settings", "unreachable", "installed"),
    [
        pytest.param({}, {CPU}, [PIN], id="no CPU index"),
        pytest.param({"TORCH_SPEC": PIN}, {CPU}, [PIN], id="no CPU index, and a version"),
        pytest.param({}, set(), ["--index-url", CPU, PIN], id="all reachable"),
        pytest.param({"TORCH_INDEX": "u"}, {"u"}, None, id="an index that the user chose"),
        pytest.param({}, {CPU, PIN}, None, id="no network"),
    ],
)
def test_torch_is_installed_without_the_index_of_cpu_builds(
    settings: dict[str, str], unreachable: set[str], installed: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def pip(arguments: list[str]) -> int:
        if "--no-index" in arguments:
            return 1
        calls.append([x for x in arguments if x not in ("--quiet", "--progress-bar", "off")])
        return int(not unreachable.isdisjoint(arguments))

    _, arguments = install_torch.choose(settings, PIN, nvidia=False, pip=pip)
    code = install_torch.install(arguments, pip=pip)
    assert code == int(installed is None)
    assert installed is None or calls[-1] == installed
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(calls) - 1
    assert all(CPU in line and "5 GB" in line for line in said)


def test_torch_is_pinned() -> None:
    assert install_torch.pinned("torch", (ROOT / "constraints.txt").read_text()) == PIN


def test_the_index_of_cuda_images_was_chosen_for_the_pinned_torch() -> None:
    """PyTorch drops CUDA versions: a new torch needs a look at its index, which the test below takes with LONG=1."""
    assert install_torch.CUDA_TORCH == PIN


@pytest.mark.skipif(not LONG, reason="asks the index of torch; LONG=1 runs it")
def test_the_index_of_cuda_images_has_the_pinned_torch() -> None:
    name, cuda = PIN.replace("==", "-"), CUDA.rpartition("/")[2]
    try:
        with urlopen(f"{CUDA}/torch/", timeout=30) as response:
            page = unquote(response.read().decode())
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            raise
        pytest.skip(f"not tried: {CUDA} answers {error.code}")
    except URLError as error:
        pytest.skip(f"not tried: {CUDA} can't be reached from here: {error.reason}")
    assert f"{name}+{cuda}-cp311-cp311-manylinux" in page


def test_the_size_report_names_files_and_functions_beyond_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size_report, "ROOT", tmp_path)
    body = "    x = 1\n"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "a.py").write_text("def fits():\n" + body * 59 + "def outgrown():\n" + body * 60)
    (tmp_path / "tools" / "b.py").write_text("x = 1\n" * 501)
    assert size_report.report("tools", "HEAD") == [
        "tools/b.py: 501 lines, the limit is 500",
        "tools/a.py:61 outgrown: 61 lines, the limit is 60",
    ]
    assert "tools" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "content", "violation"),
    [
        ("operator/__init__.py", "", "operator/__init__.py: must not exist"),
        ("engine/src/octavo_engine/core/__init__.py", "import x\n", "core/__init__.py: must be empty"),
        ("tests/unit/__init__.py", "", "tests are no packages"),
        ("server/src/octavo_server/utils.py", "", "name the file after the thing in it"),
    ],
)
def test_a_layout_violation_is_found(tmp_path: Path, path: str, content: str, violation: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(content)
    found = list(check_layout.violations(tmp_path))
    assert len(found) == 1
    assert violation in found[0]


def test_the_layout_allows_the_public_face_and_test_support(tmp_path: Path) -> None:
    for path in (check_layout.PUBLIC_FACE, Path("tests/support/octavo_testing/__init__.py")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("x = 1\n")
    assert list(check_layout.violations(tmp_path)) == []


def test_two_test_files_of_one_name_are_a_violation(tmp_path: Path) -> None:
    for folder in ("unit", "api"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_a.py").touch()
    assert len(list(check_layout.violations(tmp_path))) == 1
