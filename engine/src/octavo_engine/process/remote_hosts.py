"""`RemoteHosts` and `RemoteRank` represent, on the first host, the other hosts of a model and the ranks on them.

The first host waits for the others, which join in any order. Once all have joined, the engine ends if a host ends.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec

from octavo_engine.process import rank_messages as messages
from octavo_engine.process.control_connection import LOST_S, ControlConnection, describe_address
from octavo_engine.process.messages import Failed
from octavo_engine.settings.config import EngineConfig, ranks_per_host
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.fingerprint import adapter_fingerprint, weights_fingerprint
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)
SECRET_VARIABLE = "OCTAVO_GROUP_SECRET"
_LEAST_SECRET_CHARS = 32
#: Time between two log lines about missing hosts.
_REMINDER_S = 10.0
#: Settings that must be equal on all hosts, because each host makes its own decisions with them.
_COMMON = (
    *("nnodes", "tensor_parallel_size", "pipeline_parallel_size", "dtype", "quantization", "load_format"),
    *("model_impl", "device", "hf_overrides", "block_size", "kv_cache_dtype", "max_model_len", "enable_lora"),
    "max_lora_rank",
)
OnReport = Callable[[int, messages.FromRank | None], None]


def read_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of the group. Raises StartupError without one, or for a short one."""
    secret = environment.get(SECRET_VARIABLE, "")
    if len(secret) >= _LEAST_SECRET_CHARS:
        return secret.encode()
    found = f"has {len(secret)} characters" if secret else "is not set"
    raise StartupError(
        f"${SECRET_VARIABLE} {found}; several hosts need the same secret of {_LEAST_SECRET_CHARS} characters or more: "
        f"set it to the output of `openssl rand -hex 32` on all hosts."
    )


def _first_address(config: EngineConfig) -> str:
    """Return the address to listen on. Raises StartupError."""
    problem = ""
    try:
        address = str(_resolve(config.master_addr, config.master_port)[4][0])
        if not ip_address(address).is_unspecified:
            return address
    except OSError as error:
        problem = f"{error.strerror}: "
    except UnicodeError:
        problem = "it is no name: "
    raise StartupError(
        f"--master-addr {config.master_addr}: {problem}it must be one address of this host, the first one, to which "
        "the other hosts connect."
    )


def _resolve(name: str, port: int) -> Any:
    """Return an entry of `getaddrinfo`, IPv6 first: ZeroMQ, which resolves the name on other hosts, prefers it, too."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)
    return min(found, key=lambda entry: entry[0] != socket.AF_INET6)


def common_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the version and the settings that must be equal on all hosts. The keys are their names in messages."""
    flags = {f"--{name.replace('_', '-')}": getattr(config, name) for name in _COMMON}
    return {"the version of Octavo": version("octavo-engine"), **flags}


def named_fingerprints(config: EngineConfig, files: ModelFiles, adapters: Mapping[str, Path]) -> dict[str, str]:
    """Return the fingerprints of weights and adapters, which must be equal on all hosts, by their names in messages."""
    of_adapters = {f"adapter {name}": adapter_fingerprint(folder) for name, folder in adapters.items()}
    return {"weights": weights_fingerprint(files, config.quantization), **of_adapters}


def _drain() -> None:
    """Send SIGTERM to the process that drains at this signal: this one, or, in an engine core (which ignores it), the
    parent."""
    is_core = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    os.kill(os.getppid() if is_core else os.getpid(), signal.SIGTERM)


def own_address(master_addr: str, port: int) -> str:
    """Return `$VLLM_HOST_IP`, or this host's address on its route to the first host. Raises OSError."""
    if address := os.environ.get("VLLM_HOST_IP"):
        return address
    family, kind, protocol, _, target = _resolve(master_addr, port)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


class RemoteHosts:
    """All hosts except the first. `config`: settings with `nnodes` > 1. `stop` must be called in every case."""

    def __init__(self, config: EngineConfig) -> None:
        """Listen for the other hosts. Raises StartupError."""
        self._config, self._num_ranks = config, ranks_per_host(config)
        self._lock = threading.Condition()
        self._hellos: dict[int, tuple[bytes, messages.HostHello]] = {}  # peer and hello, by node rank
        self._has_started = self._is_stopping = self._has_warned = self._is_broken = False
        self._ranks: dict[int, RemoteRank] = {}
        self._found: dict[int, dict[str, str]] = {}  # fingerprints of each host's files, by node rank
        self._lost: dict[int, str] = {}  # why hosts left after all had joined, by node rank
        secret, address = read_secret(os.environ), _first_address(config)
        self._connection = ControlConnection(secret, address, config.master_port, self, listens=True)
        self._connection.start()
        self.address = own_address(address, config.master_port)

    def wait(self) -> None:
        """Wait until all hosts have joined. Raises StartupError if the connection fails.

        A long wait is logged as a warning, which also scripts without logging settings show.
        """
        level = logging.INFO
        with self._lock:
            while missing := sorted(set(range(1, self._config.nnodes)) - self._hellos.keys()):
                if self._is_broken:
                    raise StartupError("the connection to other hosts has failed; the log has the cause.")
                names = ", ".join(f"host {node_rank}" for node_rank in missing)
                what = names, self._config.nnodes, self._own_name()
                _LOGGER.log(level, "waiting for %s of %d to connect to %s", *what)
                level = logging.INFO if self._lock.wait(_REMINDER_S) else logging.WARNING
            self._has_started = True

    def check_files(self, files: ModelFiles, adapters: Mapping[str, Path]) -> None:
        """Let all hosts find model and adapters. Raises StartupError if the contents differ, or if a host fails.

        `adapters`: folders on this host of the start's adapters, by name.
        """
        own = named_fingerprints(self._config, files, adapters)
        locations = {each.name: each.path for each in self._config.lora_modules}
        sources = {name: (locations[name], fetched_revision(folder)) for name, folder in adapters.items()}
        self._send_all(messages.FindFiles(self._config.model, fetched_revision(files.root), sources))
        with self._lock:
            while missing := sorted(self._hellos.keys() - self._found.keys()):
                for node_rank, reason in self._lost.items():
                    raise StartupError(f"{_describe(self._hellos[node_rank][1])}: {reason}")
                if not self._lock.wait(_REMINDER_S):
                    names = ", ".join(_describe(self._hellos[node_rank][1]) for node_rank in missing)
                    _LOGGER.warning("waiting for %s to find or download the model's files", names)
        for node_rank, found in sorted(self._found.items()):
            for name, fingerprint in own.items():
                if (theirs := found.get(name, "")) != fingerprint:
                    raise StartupError(
                        f"{_describe(self._hellos[node_rank][1])} does not have the {name} of this host: their "
                        f"fingerprints are {theirs[:16]} and {fingerprint[:16]}: give all hosts the same files."
                    )

    def has_rank(self, rank: int) -> bool:
        return rank >= self._num_ranks

    def name_rank(self, rank: int) -> str:
        """Name a rank of any host in messages for the user."""
        if not self.has_rank(rank):
            return f"rank {rank}"
        return f"rank {rank} on {self.name_host(rank)}"

    def name_host(self, rank: int) -> str:
        """Name the host of a rank in messages for the user."""
        return _describe(self._hellos[rank // self._num_ranks][1])

    def start_rank(self, rank: int, on_report: OnReport) -> "RemoteRank":
        """Start the process of a rank on its host."""
        peer, hello = self._hellos[rank // self._num_ranks]
        remote = RemoteRank(rank, hello.address, lambda data: self._connection.send(data, peer), on_report)
        with self._lock:
            self._ranks[rank] = remote
            reason = self._lost.get(rank // self._num_ranks)
        if reason is not None:
            remote.fail(reason)
        self._connection.send(messages.encode(messages.StartRank(rank)), peer)
        return remote

    def announce_serving(self) -> None:
        self._send_all(messages.Serving())

    def announce_end(self, reason: str) -> None:
        """Send all hosts the error that ends the engine. Any thread may call this: an engine core that is
        stuck never calls `stop`."""
        self._send_all(messages.Goodbye(reason))

    def stop(self, reason: str | None) -> None:
        """End the hosts. `reason`: the error that ends the engine. A second call does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._send_all(messages.Goodbye(reason))
        self._connection.close()

    def connected(self) -> None:
        """Do nothing: other hosts connect to this one."""

    def received(self, peer: bytes, message: bytes) -> None:
        try:
            decoded = messages.decode_from_host(message)
        except msgspec.DecodeError as error:
            reason = messages.describe_unknown(error)
            self._connection.send(messages.encode(messages.HostRefused(reason)), peer)
            self._fail(peer, reason)
            return
        node_rank = self._node_rank(peer)
        match decoded:
            case messages.HostHello() as hello:
                self._join(peer, hello)
            case _ if node_rank == 0:
                _LOGGER.debug("a message of a host of an earlier engine is ignored")
            case messages.Found(fingerprints):
                with self._lock:
                    self._found[node_rank] = fingerprints
                    self._lock.notify()
            case messages.Reported(rank, report):
                if rank // self._num_ranks == node_rank and rank in self._ranks:
                    self._ranks[rank].take(report)
            case messages.Drain():
                _LOGGER.info("host %d is to end: the engine finishes its requests", node_rank)
                _drain()
            case messages.HostFailed(text):
                self._fail(peer, text)

    def lost(self, peer: bytes) -> None:
        with self._lock:
            self._is_broken = self._is_broken or not peer
            self._lock.notify()
        self._fail(peer, f"the host has ended, or gave no sign of life for {LOST_S} s.")

    def refused(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            name = self._own_name()
            _LOGGER.warning("a process has connected to %s without the secret of this group of hosts", name)

    def _send_all(self, message: messages.ToHost) -> None:
        for peer, _ in list(self._hellos.values()):
            self._connection.send(messages.encode(message), peer)

    def _own_name(self) -> str:
        return describe_address(self._config.master_addr, self._config.master_port)

    def _join(self, peer: bytes, hello: messages.HostHello) -> None:
        with self._lock:
            old = self._hellos.get(hello.node_rank, (peer, hello))[0]
            reason = self._find_problem(peer, hello)
            if reason is None:
                self._hellos[hello.node_rank] = peer, hello
                self._lock.notify()
        if reason is not None:
            _LOGGER.warning("%s cannot join: %s", _describe(hello), reason)
            self._connection.send(messages.encode(messages.HostRefused(reason)), peer)
            return
        if old != peer:  # its end is not known yet, or two processes have the same number
            reason = f"--node-rank {hello.node_rank} is taken by a later process of {_describe(hello)}: start only one."
            self._connection.send(messages.encode(messages.HostRefused(reason)), old)
        _LOGGER.info("%s has joined", _describe(hello))

    def _find_problem(self, peer: bytes, hello: messages.HostHello) -> str | None:
        own = common_settings(self._config)
        for name, value in own.items():
            if hello.settings.get(name) != value:
                found = hello.settings.get(name)
                return f"{name} is {found} on {_describe(hello)}, and {value} on the first host: make them equal."
        if not 1 <= hello.node_rank < self._config.nnodes:
            return f"--node-rank {hello.node_rank} must be at least 1 and below --nnodes {self._config.nnodes}."
        known, other = self._hellos.get(hello.node_rank, (peer, hello))
        if known != peer and (self._has_started or other.address != hello.address):
            name = _describe(other)
            return f"--node-rank {hello.node_rank} is taken by {name}: give each host a different one."
        return None

    def _node_rank(self, peer: bytes) -> int:
        """Return the number of a host; 0 if it has not joined."""
        return next((node_rank for node_rank, (known, _) in self._hellos.items() if known == peer), 0)

    def _fail(self, peer: bytes, message: str) -> None:
        """Report a host's end as the end of its ranks. A host that has left before all hosts have joined may join
        again, however."""
        with self._lock:
            node_rank = self._node_rank(peer)
            if node_rank == 0 or self._is_stopping:
                return
            if not self._has_started:
                _LOGGER.warning("%s has left: %s", _describe(self._hellos.pop(node_rank)[1]), message)
                return
            self._lost[node_rank] = message
            self._lock.notify()
            ranks = [each for each in self._ranks.values() if each.rank // self._num_ranks == node_rank]
        for rank in ranks:
            rank.fail(message)


class RemoteRank:
    """Represents a rank on another host, with the functions of `RankProcess`."""

    def __init__(self, rank: int, address: str, send: Callable[[bytes], None], on_report: OnReport) -> None:
        self.rank, self._address, self._has_ended = rank, address, False
        self._send, self._on_report = send, on_report

    def take(self, report: messages.FromRank | None) -> None:
        if not self._has_ended:
            self._has_ended = report is None
            self._on_report(self.rank, report)

    def fail(self, reason: str) -> None:
        self.take(Failed(reason))
        self.take(None)

    def load(self, part: messages.LoadPart) -> None:
        part.address = self._address
        self._send(messages.encode(messages.LoadRank(part)))

    def send(self, message: bytes) -> None:
        self._send(messages.encode(messages.Pass(self.rank, message)))

    def kill(self) -> None:
        self._send(messages.encode(messages.Kill(self.rank)))

    def request_stop(self) -> None:
        """Do nothing: the host ends its ranks once it gets `Goodbye`."""

    def stop(self) -> None:
        """Do nothing, as `request_stop`."""


def _describe(hello: messages.HostHello) -> str:
    return f"host {hello.node_rank} ({hello.address})"
