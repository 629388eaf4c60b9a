"""Pure parts of `octavo up`: split of resources, arguments, restart delays, and lines of the console."""

import io
import socket
from pathlib import Path

import pytest
from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MemoryInfo
from octavo_engine.runner.kv_cache_size import ModelMemory, default_kv_bytes, size_kv
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.main import build_parser
from octavo_server.cli.up import check, route_args, serve_args, visible_gpus
from octavo_server.config import ServerConfig, TlsSettings
from octavo_server.http.listener import ReservedPorts
from octavo_server.up.console import MAX_LINE_BYTES, Console, LineSplitter
from octavo_server.up.plan import EngineOptions, UpOptions, plan_children
from octavo_server.up.resource_split import MachineResources, ResourceShare, split_resources
from octavo_server.up.supervisor import MAX_IN_A_ROW, STABLE_S, RestartPolicy
from octavo_testing.usage_errors import usage_error


def machine(env=None, *, cpus=8, limits=None):
    return MachineResources(env=env or {}, affinity=frozenset(range(cpus)), limits=limits or CgroupLimits())


@pytest.mark.parametrize(
    ("given", "around", "num", "expected"),
    [
        (EngineConfig(), machine(), 1, ResourceShare(num_threads=8)),
        (EngineConfig(), machine(), 2, ResourceShare(num_threads=4, num_engines=2)),
        (EngineConfig(), machine(cpus=2), 4, ResourceShare(num_threads=1, num_engines=4)),
        (EngineConfig(), machine(limits=CgroupLimits(cpus=4.0)), 2, ResourceShare(num_threads=2, num_engines=2)),
        (EngineConfig(num_threads=3), machine(), 2, ResourceShare(num_threads=None, num_engines=2)),
        (EngineConfig(), machine({"OMP_NUM_THREADS": "3"}), 2, ResourceShare(num_threads=None, num_engines=2)),
        (EngineConfig(gpu_memory_utilization=0.4), machine(), 2, ResourceShare(num_threads=4, num_engines=1)),
        (
            EngineConfig(),
            machine({"VLLM_CPU_OMP_THREADS_BIND": "0-3|4-7"}),
            2,
            ResourceShare(num_threads=None, num_engines=2, bind=("0-3", "4-7")),
        ),
        (
            EngineConfig(),
            machine({"OCTAVO_CPU_OMP_THREADS_BIND": "0-3"}),
            2,
            ResourceShare(num_threads=None, num_engines=2),
        ),
    ],
)
def test_each_engine_gets_its_part_unless_the_user_set_it(given, around, num, expected):
    assert split_resources(given, around, [1] * num) == expected


@pytest.mark.parametrize(
    ("ranks", "value", "expected"),
    [
        ([2, 2], "0|1|2|3", ("0|1", "2|3")),
        ([1, 2], "0|1|2-3", ("0", "1|2-3")),
        ([2, 2], "0-1|2-3", ("0-1", "2-3")),
        ([2, 2], "0|1|2", None),
        ([2], "0|1", None),  # the engine itself divides it
    ],
)
def test_each_rank_gets_its_cpus(ranks, value, expected):
    around = machine({"VLLM_CPU_OMP_THREADS_BIND": value})
    assert split_resources(EngineConfig(), around, ranks).bind == expected


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        (EngineConfig(), ("0", "1", "2"), [("0", "1"), ("1", "1"), ("2", "1")]),
        (EngineConfig(device="cuda"), ("GPU-a", "GPU-b"), [("GPU-a", "2"), ("GPU-b", "1"), ("GPU-a", "2")]),
        (EngineConfig(), ("0",), [("0", "3"), ("0", "3"), ("0", "3")]),
        (EngineConfig(device="cpu"), ("0", "1"), [(None, None)] * 3),
        (EngineConfig(), (), [(None, None)] * 3),
    ],
)
def test_each_engine_gets_a_gpu(given, gpus, expected):
    resources = MachineResources(env={}, affinity=frozenset({0}), limits=CgroupLimits(), gpus=gpus)
    share = split_resources(given, resources, [1] * 3)
    found = [share.env(i) for i in range(3)]
    assert [(env.get("CUDA_VISIBLE_DEVICES"), env.get("OCTAVO_ENGINES_PER_GPU")) for env in found] == expected
    assert {env["OCTAVO_NUM_ENGINES"] for env in found} == {"3"}


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "expected"),
    [
        ([2, 2], 4, [("0,1", "1"), ("2,3", "1")]),
        ([2, 1, 2], 4, [("0,1", "2"), ("2", "1"), ("3,0", "2")]),
        ([2, 2], 2, [("0,1", "2"), ("0,1", "2")]),
        ([4], 2, [("0,1", "1")]),  # the engine refuses to start
    ],
)
def test_each_rank_gets_a_gpu(ranks, num_gpus, expected):
    gpus = tuple(map(str, range(num_gpus)))
    resources = MachineResources(env={}, affinity=frozenset({0}), limits=CgroupLimits(), gpus=gpus)
    share = split_resources(EngineConfig(), resources, ranks)
    found = [share.env(i) for i in range(len(ranks))]
    assert [(env["CUDA_VISIBLE_DEVICES"], env["OCTAVO_ENGINES_PER_GPU"]) for env in found] == expected


def test_gpus_are_those_that_cuda_sees(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-a"}, tmp_path) == ("2", "GPU-a")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()


def test_share_becomes_environment_variables(monkeypatch):
    share = ResourceShare(num_threads=1, num_engines=2, bind=("0", "1"))
    assert share.env(1) == {"OCTAVO_NUM_ENGINES": "2", "OCTAVO_CPU_OMP_THREADS_BIND": "1"}
    assert ResourceShare(num_threads=1).env(0) == {}
    monkeypatch.setenv("OCTAVO_NUM_ENGINES", "2")
    assert CpuDevice().memory().num_engines == 2


def test_the_caches_of_all_engines_take_what_one_engine_takes():
    for free_gib, num in ((6, 2), (20, 5), (200, 8)):
        memory = MemoryInfo(total_bytes=256 * GIB, available_bytes=free_gib * GIB, num_engines=num)
        model = ModelMemory(weights_bytes=0, bytes_per_block=1 << 20)
        kv = size_kv(EngineConfig(), model, memory, max_model_len=16)
        assert num * kv.kv_bytes <= default_kv_bytes(free_gib * GIB)


SHARE = ResourceShare(num_threads=3)
ENGINES = tuple(
    EngineOptions(name=f"replica-{i}", args=("m", "--num-threads", "7"), port=i + 1, position=i, share=SHARE)
    for i in range(2)
)
OPTIONS = UpOptions(engines=ENGINES, route_args=("--workers", "2"), port=80, secret="s3cret")


def test_plan_has_a_router_for_all_replicas():
    plan = plan_children(OPTIONS)
    assert plan.names == ["router", "replica-0", "replica-1"]
    urls = ["--replica", "http://127.0.0.1:1", "--replica", "http://127.0.0.1:2"]
    assert plan.router.args == ("route", "--port", "80", *urls, "--workers", "2")
    assert plan.router.url == "http://localhost:80"
    first = plan.replicas[0]
    assert first.args[:5] == ("serve", "--host", "127.0.0.1", "--port", "1")
    assert first.args[-5:] == ("--num-threads", "3", "m", "--num-threads", "7")  # typed flags take precedence


def test_secret_is_only_in_the_environment():
    plan = plan_children(OPTIONS)
    for child in (plan.router, *plan.replicas):
        assert child.env["OCTAVO_ROUTER_SECRET"] == "s3cret"
        assert not any("s3cret" in arg for arg in child.args)
    assert "s3cret" not in repr(plan) + repr(OPTIONS)


def parsed(*argv):
    return build_parser().parse_args(["up", *argv])


def test_engines_get_all_flags_except_those_of_up():
    args = parsed(
        *("m", "--replicas", "3", "--dtype", "float32", "--port=9", "--router-args=--workers 2", "--host", "::"),
        *("--served-model-name", "a", "b", "--no-kv-stream"),
    )
    kept = ("m", "--dtype", "float32", "--served-model-name", "a", "b", "--no-kv-stream")
    assert serve_args(args.typed) == kept
    assert args.router_args == ["--workers", "2"]


def test_config_file_may_set_all_flags(tmp_path):
    file = tmp_path / "up.yaml"
    file.write_text("model: m\nreplicas: 3\nport: 9\nmax-model-len: 64\n")
    args = parsed("--config", str(file), "--max-model-len", "32")
    assert (args.replicas, args.port) == (3, 9)
    assert serve_args(args.typed) == ("--max-model-len", "32", "--model=m")


def test_router_gets_flags_for_keys_traces_and_shutdown():
    args = parsed("--api-key", "k1", "k2", "--drain-timeout", "5", "--otlp-traces-endpoint", "http://c")
    assert route_args(args) == [
        *("--otlp-traces-endpoint=http://c", "--api-key", "k1", "k2", "--drain-timeout=5.0"),
    ]
    assert route_args(parsed("--disable-uvicorn-access-log")) == ["--disable-uvicorn-access-log"]


def test_router_gets_every_setting_that_it_shares_with_engines_but_address_and_secret():
    """A router without these settings would refuse a large body, or the name of a host, that engines accept."""
    flags = ["--allowed-hosts", "a", "--max-request-bytes=64000000", "--keep-alive-timeout=7", "--max-connections=9"]
    own = ["--host=::1", "--port=1", "--router-secret", "s", "--max-n=3", "--num-threads=2"]
    assert sorted(route_args(parsed(*flags, *own))) == sorted(flags)
    assert route_args(parsed()) == []


@pytest.mark.parametrize("argv", [["--replicas", "0"], ["--replicas", "65"], ["--replicas", "many"], ["--dry-run"]])
def test_invalid_values_are_rejected_by_the_parser(argv, capsys):
    assert argv[0] in usage_error(capsys, parsed, *argv)


def test_arguments_that_engines_cannot_share_are_rejected():
    config, engine = ServerConfig(served_model_names=("m",)), EngineConfig(model="m")
    with pytest.raises(StartupError, match="--trace"):
        check(parsed("--trace", "file"), config, engine)
    check(parsed("--trace", "file", "--replicas", "1"), config, engine)
    with pytest.raises(StartupError, match="--nnodes"):
        check(parsed(), config, EngineConfig(model="m", nnodes=2, tensor_parallel_size=2))
    with pytest.raises(StartupError, match="--router-secret"):
        check(parsed(), ServerConfig(served_model_names=("m",), router_secret=("s",)), engine)
    for listen in ({"uds": Path("s")}, {"tls": TlsSettings(ssl_certfile=Path("c"))}):
        with pytest.raises(StartupError, match="--uds and --ssl-"):
            check(parsed(), ServerConfig(served_model_names=("m",), **listen), engine)


def test_router_gets_the_flags_about_web_pages():
    flags = ('--allowed-methods=["POST"]', "--allow-credentials")
    assert [flag for flag in flags if flag not in route_args(parsed(*flags))] == []


def test_restart_delays_double_up_to_a_limit():
    restart_policy = RestartPolicy()
    delays = [restart_policy.record_exit(served_s=2.0) for _ in range(MAX_IN_A_ROW + 1)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_process_that_never_served_is_not_restarted():
    assert RestartPolicy().record_exit(served_s=0.0) is None


def test_process_that_served_may_fail_to_start_a_few_times():
    restart_policy = RestartPolicy()
    assert restart_policy.record_exit(served_s=3.0) == 1.0
    assert restart_policy.record_exit(served_s=0.0) == 2.0


def test_delay_is_reset_after_a_minute_of_serving():
    restart_policy = RestartPolicy()
    for _ in range(3 * MAX_IN_A_ROW):
        assert restart_policy.record_exit(served_s=STABLE_S) == 1.0


def test_lines_have_the_name_of_their_process():
    out = io.StringIO()
    console = Console(out, ["router", "up"], has_colour=False)
    console.show("up", "one")
    console.show("router", '{"time": 1}')
    assert out.getvalue() == 'up     | one\n{"source": "router", "time": 1}\n'


def test_names_are_coloured_on_a_terminal():
    out = io.StringIO()
    Console(out, ["a", "b"], has_colour=True).show("b", "text")
    assert out.getvalue() == "\x1b[33mb |\x1b[0m text\n"


def test_lines_are_assembled_from_chunks_of_any_size():
    lines = LineSplitter()
    whole = "a\r\nbé\n\nc".encode()
    assert [line for i in range(len(whole)) for line in lines.feed(whole[i : i + 1])] == ["a", "bé", ""]
    assert list(lines.rest()) == ["c"]
    assert list(lines.rest()) == []
    assert [len(line) for line in lines.feed(b"x" * (MAX_LINE_BYTES + 1))] == [MAX_LINE_BYTES + 1]


def test_reserved_port_is_given_to_no_other_process():
    with ReservedPorts() as ports:
        port = ports.reserve("127.0.0.1", 0)
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ours.bind(("127.0.0.1", port))
            ours.listen()
            with pytest.raises(StartupError, match=f"{port}.*--port"), ReservedPorts() as others:
                others.reserve("127.0.0.1", port)
