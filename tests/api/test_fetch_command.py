"""`octavo fetch` as a process, with real clients and loopback servers that implement the hub's API and S3."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from octavo_engine.sources.resolve import resolve_model
from octavo_operator.desired.weights import CACHE_PATH, weights_of
from octavo_operator.service import Settings, read_service
from octavo_testing.fetch_command import TIMEOUT_S, fetch_environment, run_fetch, start_fetch
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.local_bucket import LocalBucket
from octavo_testing.local_hub import LocalHub

pytestmark = pytest.mark.slow

BIG = os.urandom(3_000_000)
MODEL = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": BIG,
}
NOISE = {"README.md": b"# m", "pytorch_model.bin": b"y", "onnx/model.onnx": b"z"}
HUB, S3 = "hf://org/model", "s3://models/team/tiny"


class Source:
    """A hub or a bucket with the same model, and the environment with which `octavo fetch` reaches it."""

    def __init__(self, uri: str, server: LocalHub | LocalBucket, address: str, folder: Path) -> None:
        self.uri, self.server, self.folder = uri, server, folder
        hub = {"HF_ENDPOINT": address, "HF_HUB_ETAG_TIMEOUT": "60"}
        environ = server.environment(address) if isinstance(server, LocalBucket) else hub
        self.env = fetch_environment(folder, **environ)

    def fetch(self, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        return run_fetch(self.uri, *arguments, env={**self.env, **more})

    def downloads(self) -> list[str]:
        """The files that were sent, in alphabetical order."""
        got = (request.split()[1] for request in self.server.requests if request.startswith("GET"))
        return sorted(path.rpartition("/")[2] for path in got if "/api/" not in path and path != "/models")


@pytest.fixture(params=[HUB, S3])
def source(request: pytest.FixtureRequest, tmp_path: Path):
    server = LocalHub() if request.param == HUB else LocalBucket()
    prefix = "" if request.param == HUB else "team/tiny/"
    server.files = {prefix + name: content for name, content in (MODEL | NOISE).items()}
    with server.running() as address:
        yield Source(request.param, server, address, tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return done.stderr.rstrip().splitlines()[-1]


def test_fetch_downloads_only_the_needed_files(source: Source) -> None:
    target = source.folder / "m"
    done = source.fetch("--to", str(target))
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert contents(target) == MODEL
    assert source.downloads() == sorted(MODEL)
    assert f"{source.uri}: fetching 3 files, 2.86 MiB, into {target}" in done.stderr
    assert resolve_model(str(target)).load_format == "safetensors"


def test_second_fetch_downloads_nothing(source: Source) -> None:
    target = str(source.folder / "m")
    source.fetch("--to", target)
    source.server.requests.clear()
    done = source.fetch("--to", target)
    assert (done.returncode, source.downloads()) == (0, [])
    assert "already in" in done.stderr
    (source.folder / "m" / "tokenizer.json").unlink()
    assert source.fetch("--to", target).returncode == 0
    assert source.downloads() == ["tokenizer.json"]
    assert contents(source.folder / "m") == MODEL


def test_serve_finds_a_model_fetched_without_a_folder(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The init container and the engine of a pod use the same name and environment, one after the other."""
    done = source.fetch()
    assert done.returncode == 0, done.stderr
    source.server.requests.clear()
    again = run_python(source, f"print(resolve_model({source.uri!r}).root)")
    assert again == done.stdout.strip()
    assert source.downloads() == []


def test_download_dir_replaces_the_cache(source: Source) -> None:
    folder = source.folder / "downloads"
    code = (
        "from octavo_engine.settings.config import EngineConfig; "
        "from octavo_engine.sources.resolve import resolve_files; "
        f"print(resolve_files(EngineConfig(model={source.uri!r}, download_dir={str(folder)!r})).root)"
    )
    root = Path(run_python(source, code))
    assert folder in root.parents
    source.server.requests.clear()
    assert Path(run_python(source, code)) == root
    assert source.downloads() == []


def test_hub_token_of_the_flag_is_sent(tmp_path: Path) -> None:
    server = LocalHub()
    server.files, server.token = dict(MODEL), "hf_mine"
    with server.running() as address:
        source = Source(HUB, server, address, tmp_path)
        code = (
            "from octavo_engine.sources.hub import set_hub_token; set_hub_token('hf_mine'); "
            f"print(resolve_model({HUB!r}).root)"
        )
        assert run_python(source, code)


def test_fetched_model_is_served_without_the_source(source: Source) -> None:
    first = source.fetch()
    source.server.statuses = {"": [503] * 50}
    assert run_python(source, f"{IMPATIENT}print(fetch_model({source.uri!r}))") == first.stdout.strip()


def test_partial_model_is_not_used_without_the_hub(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    server = LocalHub()
    server.files = {**MODEL, **dict.fromkeys(shards, b"x"), "model.safetensors.index.json": json.dumps(index).encode()}
    del server.files["model.safetensors"]
    with server.running() as address:
        source = Source(HUB, server, address, tmp_path)
        server.statuses = {f"{server.commit}/{shards[1]}": [404]}
        assert source.fetch().returncode == 1
        server.statuses = {"": [503] * 50}
        stderr = run_python(source, f"{IMPATIENT}fetch_model({HUB!r})", fails=True)
    assert stderr.rstrip().endswith(
        "hf://org/model: the hub returned 503 (6 attempts): check the network, then try again."
    )


def test_two_processes_fetch_a_model_once(source: Source) -> None:
    source.server.held = {"model.safetensors": 1_000_000}
    first = start_fetch(source.uri, env=source.env)
    assert source.server.reached.wait(TIMEOUT_S)
    second = start_fetch(source.uri, env=source.env)
    lines = Lines(second)
    lines.until("waiting for another process")
    source.server.released.set()
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), lines.text
    assert outputs[0] == outputs[1]
    assert source.downloads() == sorted(MODEL)


class Lines:
    """Reads the standard error of a process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.text, self._process = "", process

    def until(self, text: str) -> None:
        assert self._process.stderr is not None
        watchdog = threading.Timer(TIMEOUT_S, self._process.kill)
        watchdog.start()
        while text not in self.text:
            line = self._process.stderr.readline()
            assert line, f"ended without printing {text!r}: {self.text}"
            self.text += line
        watchdog.cancel()


def test_a_killed_fetch_leaves_no_lock_and_no_half_model(source: Source) -> None:
    target = source.folder / "m"
    source.server.held = {"model.safetensors": 2_000_000}
    killed = start_fetch(source.uri, "--to", str(target), env=source.env)
    assert source.server.reached.wait(TIMEOUT_S)
    if source.uri == S3:
        wait_for(lambda: partial_bytes(target) >= 1_000_000)
    killed.kill()
    killed.communicate(timeout=TIMEOUT_S)
    assert contents(target) == {}
    source.server.held = {}
    source.server.requests.clear()
    done = source.fetch("--to", str(target))
    assert done.returncode == 0, done.stderr
    assert contents(target) == MODEL
    if source.uri == S3:  # the download resumes within the file; the hub's client restarts a file
        (request,) = source.server.asked("model.safetensors")
        assert int(request.partition("bytes=")[2].partition("-")[0]) >= 1_000_000


def partial_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("model.safetensors.partial"))


def wait_for(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_fetch_stops_at_once_after_a_signal(source: Source, sig: signal.Signals) -> None:
    """The signal arrives during a download that stalls."""
    source.server.held = {"model.safetensors": 1_000_000}
    process = start_fetch(source.uri, env=source.env)
    assert source.server.reached.wait(TIMEOUT_S)
    process.send_signal(sig)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + sig
    assert stderr.rstrip().splitlines()[-1].startswith("octavo: stopped by a signal")
    assert not source.server.released.is_set()


def test_broken_connection_is_retried(source: Source) -> None:
    source.server.cut_after = {"model.safetensors": [2_000_000]}
    done = source.fetch("--to", str(source.folder / "m"))
    assert done.returncode == 0, done.stderr
    assert contents(source.folder / "m") == MODEL
    gets = [request for request in source.server.asked("model.safetensors") if request.startswith("GET")]
    assert len(gets) == 2
    if source.uri == S3:  # the hub's client writes 10 MB at a time
        assert int(gets[1].partition("bytes=")[2].partition("-")[0]) >= 1_000_000


def test_busy_source_is_retried(source: Source) -> None:
    source.server.statuses = {"/models" if source.uri == S3 else "/org/model": [503, 503]}
    done = source.fetch()
    assert done.returncode == 0, done.stderr
    assert "503; retrying in" in done.stderr


def test_missing_model_is_not_retried(source: Source) -> None:
    done = run_fetch(source.uri.replace("model", "nothing"), env=source.env)
    assert done.returncode == 1
    assert "retrying" not in done.stderr
    expected = "no such model on the hub" if source.uri == HUB else "bucket or object does not exist"
    assert last_line(done).startswith("octavo: ")
    assert expected in last_line(done)


def test_lack_of_space_is_reported_before_any_download(source: Source) -> None:
    done = run_python(source, "import shutil; shutil.disk_usage = lambda _: Usage()\nfetch_model({0!r})", fails=True)
    assert "3 files of 2.86 MiB" in done
    assert "where 1.00 MiB are free: 1.86 MiB too little" in done
    assert source.downloads() == []


def test_folder_with_other_files_is_not_touched(source: Source) -> None:
    (source.folder / "m").mkdir()
    (source.folder / "m" / "thesis.txt").write_text("mine")
    done = source.fetch("--to", str(source.folder / "m"))
    assert done.returncode == 1
    assert "holds thesis.txt, which octavo did not fetch" in last_line(done)
    assert contents(source.folder / "m") == {"thesis.txt": b"mine"}


def test_new_version_replaces_the_old_one(source: Source) -> None:
    target = source.folder / "m"
    source.fetch("--to", str(target))
    prefix = "" if source.uri == HUB else "team/tiny/"
    source.server.files[f"{prefix}tokenizer.json"] = b'{"new": 1}'
    source.server.commit = "b" * 40
    done = source.fetch("--to", str(target))
    assert done.returncode == 0, done.stderr
    assert contents(target) == MODEL | {"tokenizer.json": b'{"new": 1}'}


def test_unservable_model_is_reported(source: Source) -> None:
    prefix = "" if source.uri == HUB else "team/tiny/"
    source.server.files[f"{prefix}config.json"] = b'{"quantization_config": {"quant_method": "mxfp4"}}'
    done = source.fetch()
    assert done.returncode == 1
    assert "quantisation method 'mxfp4'" in last_line(done)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_engine_finds_the_model_of_the_init_container(source: Source, revision: str | None) -> None:
    """The engine finds the model that the init container fetched, without access to the source."""
    model = {"uri": source.uri} | ({"revision": revision} if revision and source.uri == HUB else {})
    service = read_service(stored(Case("", {"model": model})))
    weights = weights_of(service, Settings(engine_image="e", router_image="r", operator_namespace="octavo-system"))
    (container,) = weights.init_containers
    cache = {
        variable["name"]: variable["value"].replace(CACHE_PATH, str(source.folder)) for variable in container["env"]
    }
    env = {**source.env, **cache}
    assert container["args"][0] == "fetch"
    done = run_fetch(*container["args"][1:], env=env)
    assert done.returncode == 0, done.stderr
    source.server.statuses = {"": [503] * 50}
    source.env = env
    found = run_python(source, f"{IMPATIENT}print(resolve_model({weights.model!r}, revision={revision!r}).root)")
    assert found == done.stdout.strip()
    assert found.startswith(str(source.folder))


PRELUDE = """
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.sources.resolve import fetch_model
class Usage: free = 2**20
"""
IMPATIENT = "from octavo_engine.sources import retries; retries.FIRST_PAUSE_S = 0.01\n"


def run_python(source: Source, code: str, *, fails: bool = False) -> str:
    command = [sys.executable, "-c", PRELUDE + code.format(source.uri)]
    done = subprocess.run(command, capture_output=True, text=True, env=source.env, timeout=TIMEOUT_S, check=False)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr if fails else done.stdout.strip()


def test_fetch_does_not_import_torch(source: Source) -> None:
    code = "fetch_model({0!r})\nimport sys; assert not {{'torch', 'transformers', 'numpy'}} & sys.modules.keys()"
    run_python(source, code)
