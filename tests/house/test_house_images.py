"""The calls that `images/build` makes to each builder. The builders here are scripts that record their arguments."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("awk", "bash", "cat", "dirname", "grep", "mkdir", "mv", "printf", "rmdir", "sed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy `images/build` to a folder without cluster tools, beside a PATH folder that has only a shell's programs."""
    (tmp_path / "octavo" / "images").mkdir(parents=True)
    shutil.copy(ROOT / "images" / "build", tmp_path / "octavo" / "images")
    (tmp_path / "octavo" / "charts" / "octavo").mkdir(parents=True)
    shutil.copy(ROOT / "charts" / "octavo" / "Chart.yaml", tmp_path / "octavo" / "charts" / "octavo")
    (tmp_path / "bin").mkdir()
    for name in NEEDED:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    return tmp_path


def _add_builder(tree: Path, name: str, body: str = "") -> None:
    script = tree / "bin" / name
    script.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >>"{tree}/calls"\n{body}\n')
    script.chmod(0o755)


def _build(tree: Path, *names: str, **settings: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script. Return its result and the calls of builders, without those that only query."""
    command = [str(tree / "octavo" / "images" / "build"), *names]
    env = {"PATH": str(tree / "bin")} | settings
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    calls = (tree / "calls").read_text().splitlines() if (tree / "calls").exists() else []
    return done, [
        call
        for call in calls
        if not any(word in call for word in (" info", "inspect", "config", " get ", "buildah images"))
    ]


@pytest.mark.parametrize(
    ("builder", "begins"),
    [
        ("docker", "docker build"),
        ("podman", "podman build --format docker"),
        ("buildah", "buildah build --format docker"),
    ],
)
def test_each_builder_builds_all_three_images(tree: Path, builder: str, begins: str) -> None:
    _add_builder(tree, builder, 'case $* in *inspect*) echo 1048576000 ;; images*) echo "1 GB" ;; esac')
    done, calls = _build(tree)
    assert done.returncode == 0, done.stderr
    assert [call.split(" -t ")[-1] for call in calls] == [
        f"localhost/octavo/{name}:0.1.0 -f images/{name}.Dockerfile ." for name in ("engine", "router", "operator")
    ]
    assert all(call.startswith(begins) for call in calls)
    sizes = [line for line in done.stdout.splitlines() if line.startswith("localhost/octavo/")]
    assert len(sizes) == 3
    assert all("1000 MiB" in line or "1 GB" in line for line in sizes)


def test_podman_builds_where_docker_does_not_answer(tree: Path) -> None:
    _add_builder(tree, "docker", "exit 1")
    _add_builder(tree, "podman", "echo 1")
    done, calls = _build(tree, "router")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls] == ["podman"]


def test_torch_and_model_settings_reach_only_the_engine_image(tree: Path) -> None:
    _add_builder(tree, "docker", "echo 1")
    settings = {"TORCH_INDEX": "https://example.test/cu130", "ENGINE_TARGET": "cuda", "MODELS": "none"}
    _, calls = _build(tree, "engine", "router", **settings)
    given = "--build-arg TORCH_INDEX=https://example.test/cu130 --build-arg MODELS=none --build-arg TARGET=cuda"
    assert [given in call for call in calls] == [True, False]
    assert "TORCH_SPEC" not in calls[0]


def test_images_are_loaded_into_the_current_kind_cluster(tree: Path) -> None:
    _add_builder(tree, "docker", "echo 1")
    _add_builder(tree, "kubectl", "echo kind-mine")
    _add_builder(tree, "kind", '[[ $* != "get clusters" ]] || printf "%s\\n" other mine')
    _, calls = _build(tree, "router")
    assert calls[1:] == ["kind load docker-image --name mine localhost/octavo/router:0.1.0"]


def test_images_can_be_pushed_to_a_registry(tree: Path) -> None:
    _add_builder(tree, "docker", "echo 1")
    _, calls = _build(tree, "router", IMAGE_PREFIX="registry.test/team", IMAGE_TAG="v1", PUSH="1")
    assert calls == [
        "docker build -t registry.test/team/router:v1 -f images/router.Dockerfile .",
        "docker push registry.test/team/router:v1",
    ]


@pytest.mark.parametrize(
    ("builder", "command"),
    [
        ("docker", "docker save -o {file} {image}"),
        ("podman", "podman save --quiet --format oci-archive -o {file} {image}"),
        ("buildah", "buildah push --quiet {image} oci-archive:{file}:{image}"),
    ],
)
def test_images_can_be_saved(tree: Path, builder: str, command: str) -> None:
    image, file = "localhost/octavo/router:0.1.0", "dist/octavo-router-0.1.0"
    _add_builder(
        tree, builder, f"[[ $* != *{file}* || $1 != build ]] || {{ mkdir -p {file}; >{file}/packages.cdx.json; }}"
    )
    done, calls = _build(tree, "router", SAVE="dist", BUILDER=builder)
    assert done.returncode == 0, done.stderr
    listing = f"{builder} build --build-arg IMAGE={image} -f images/sbom.Dockerfile --output type=local,dest={file} ."
    assert calls[1:] == [command.format(image=image, file=f"{file}.tar"), listing]
    assert (tree / "octavo" / f"{file}.cdx.json").exists()


def test_a_failed_build_ends_the_script(tree: Path) -> None:
    _add_builder(tree, "docker", "[[ $1 != build ]] || exit 3")
    done, calls = _build(tree)
    assert done.returncode == 3
    assert len(calls) == 1


def test_a_missing_builder_is_reported_with_the_remedy(tree: Path) -> None:
    done, _ = _build(tree)
    assert done.returncode != 0
    assert "install docker, podman or buildah" in done.stderr


def test_the_engine_image_finds_the_driver_and_shows_no_gpu_by_itself() -> None:
    """GKE mounts the driver below /usr/local/nvidia, and elsewhere the runtime mounts what the variables ask for.
    NVIDIA_VISIBLE_DEVICES would give every container of this image all GPUs of its node."""
    variables = _variables(ROOT / "images" / "engine.Dockerfile")
    assert variables["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    for file in (ROOT / "images").glob("*.Dockerfile"):
        assert "NVIDIA_VISIBLE_DEVICES" not in _variables(file)


def _variables(dockerfile: Path) -> dict[str, str]:
    """Environment variables of a Dockerfile's last stage."""
    lines = dockerfile.read_text().replace("\\\n", " ").splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM "))
    pairs = [word.partition("=") for line in lines[last:] if line.startswith("ENV ") for word in line.split()[1:]]
    return {name: value for name, _, value in pairs}
