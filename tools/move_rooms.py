"""Moves the engine's files into rooms, and rewrites every import, name in a string and path that names a moved file.

Run it once, on a clean work tree: `.venv/bin/python tools/move_rooms.py`. It ends with 1 and names each file whose room
it does not know. ruff sorts the imports and formats the files afterwards.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE, SERVER = "engine/src/octavo_engine", "server/src/octavo_server"

#: Per room, the folder that its files leave and their names: `old` or `old=new`.
SOURCES = {
    "settings": {
        "": "config engine_args speculative_args=speculative lora_args=lora pooling_args=pooling vllm_args=vllm "
        "vllm_argument vllm_environment"
    },
    "devices": {
        "runner": "device cuda_device cuda_queues=cuda_calls graphed_steps=cuda_graphs step_graphs=recorded_steps "
        "cpu_threads numa torch_env cgroup dtype transfers timers memory"
    },
    "sampling": {
        "runner": "sampler draws keyed_random processed_logits penalties token_masks logprobs grammar_masks seq_state "
        "lockstep drafts=accepted_drafts"
    },
    "loop": {
        "": "engine=engine_core engine_start=start pending_grammars loaded_adapters ngram=ngram_proposer "
        "draft_model_proposer draft_gain queue_deadlines trace_file"
    },
    "frontend": {
        "": "beam_search async_llm frontend=request_builder assembly output_stream outputs adapter_names sleep_switch "
        "request_limits scoring"
    },
    "offline": {
        "": "llm offline_metrics=metrics offline_progress=progress offline_unsupported=unsupported script_types "
        "interrupts"
    },
    "weights": {"ops": "signed_blocks"},
}
TESTS = {
    "unit/engine -> unit/settings": "args=engine_args lora_args=lora parallel_args=parallel",
    "unit/engine -> unit/frontend": "adapter_names assembly beam_search frontend=request_builder",
    "unit/engine -> unit/offline": "interrupts",
    "unit/engine -> unit/process": "process=core rank_calls rank_messages",
    "unit/engine -> unit/loop": "adapters core=engine_core draft_model_proposer expiry inspection pending_grammars "
    "sleep speculation start step_limit",
    "unit/runner -> unit/devices": "cgroup cuda_device device dtype graphed_steps=cuda_graphs "
    "graphed_steps_many=cuda_graphs_many memory numa step_graphs=recorded_steps torch_env",
    "unit/runner -> unit/sampling": "draws draws_many grammar_masks keyed_random lockstep logprob_ties sampler",
}
#: Files that stay where they are. A file that is neither moved nor named here has come since: it needs a room.
STAYING = {
    ENGINE: "__init__ log_format",
    f"{ENGINE}/runner": "__init__ adapter_targets adapter_weights adapters batch capacity costs draft_cache "
    "draft_source drafter engine_memory executor graphed_model kept_blocks memory_plan model_loading newest_tokens "
    "pooling rank_loading rank_plans runner warm_up",
    "tests/unit/engine": "log_format",
    "tests/unit/runner": "adapter_targets adapters ahead batch capacity costs default_flags draft_cache draft_source "
    "engine_memory gpu_memory gpu_ranks gpu_sequences isolation kept_blocks memory_plan model_loading pooling "
    "quantization rank_loading rank_plans steps warm_up",
}
#: Names that leave their module, and their new one.
NAMES = {
    "octavo_engine.runner.batch": ("octavo_engine.devices.step_inputs", ("Ints", "StepInputs", "StepLimits")),
    "octavo_engine.runner.runner": ("octavo_engine.sampling.sampler", ("MAX_LOGITS",)),
    "octavo_engine.engine_start": ("octavo_engine.process.client", ("DEFAULT_LOADER",)),
}
STEP_INPUTS = '''"""The inputs of a step's forward pass, and the bounds of its size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch
from octavo_engine.wire.plan import SeqStep

'''
ROUTER_FIXTURES = """from octavo_testing.core_server import core_config, core_server, scripted_tmp

__all__ = ["core_config", "core_server", "scripted_tmp"]
"""
#: Bare names in prose, and other text that no rule finds.
TEXTS = {
    "`vllm_args` lists": "`vllm.py` lists",
    "`vllm_args`": "`settings.vllm`",
    "`engine_start`": "`loop.start`",
    "tests/api/test_router_": "tests/router/test_router_",
    "octavo_engine.runner,octavo_shapes": (
        "octavo_engine.runner,octavo_engine.sampling,octavo_engine.weights,octavo_shapes"
    ),
    # Lines that would become too long.
    "metrics: every name, type, label and bucket. `tests/": "metrics: each name, type, label and bucket. `tests/",
    "EngineConfig; from octavo_engine.sources.resolve import resolve_files; ": (
        'EngineConfig; "\n        "from octavo_engine.sources.resolve import resolve_files; '
    ),
    "code = \"import sys, octavo_engine.frontend.async_llm; print([m for m in ('torch', 'transformers') if": (
        'heavy = ("torch", "transformers")\n'
        '    code = f"import sys, octavo_engine.frontend.async_llm; print([m for m in {heavy} if'
    ),
}
LINE_LENGTH = 120
SHIELD = "\N{SYMBOL FOR NULL}"  # stands in a rewritten name, so that no later rule rewrites it again
DOTTED = re.compile(r"\b(?:octavo_engine|octavo_server|tests)(?:\.\w+)+")
PATH = re.compile(r"(?<![\w./-])[\w./-]+\.(?:py|txt)\b")
LOGGER = re.compile(r'(?<=name\.endswith\(")\w+(?="\))')


def source_moves() -> Iterator[tuple[str, str]]:
    for room, folders in SOURCES.items():
        for folder, names in folders.items():
            for name in names.split():
                old, _, new = name.partition("=")
                yield f"{ENGINE}/{folder}/{old}.py".replace("//", "/"), f"{ENGINE}/{room}/{new or old}.py"
    yield f"{SERVER}/api/client.py", f"{SERVER}/engine_client.py"
    for name in ("", "_output", "_writer"):
        for dialect in ("responses", "messages"):
            yield f"{SERVER}/api/{dialect}{name}.py", f"{SERVER}/api/dialects/{dialect}{name}.py"


def test_moves() -> Iterator[tuple[str, str]]:
    for folders, names in TESTS.items():
        before, after = folders.split(" -> ")
        for name in names.split():
            old, _, new = name.partition("=")
            yield (
                f"tests/{before}/test_{Path(before).name}_{old}.py",
                f"tests/{after}/test_{Path(after).name}_{new or old}.py",
            )
    yield "tests/unit/runner/conftest.py", "tests/unit/devices/conftest.py"
    for path in sorted((ROOT / "tests/api").glob("*")):
        if path.name.startswith(("test_router_", "test_route_", "router_metrics")):
            yield f"tests/api/{path.name}", f"tests/router/{path.name}"


MOVES = {**dict(source_moves()), **{old: new for old, new in test_moves() if (ROOT / old).exists()}}


def module_name(path: str) -> str:
    return re.sub(r"^(engine|server)/src/", "", path).removesuffix(".py").replace("/", ".")


MODULES = {module_name(old): module_name(new) for old, new in MOVES.items() if old.endswith(".py")}
STEMS = {Path(old).stem: Path(new).stem for old, new in MOVES.items()}
FILES = {Path(old).name: Path(new).name for old, new in MOVES.items() if Path(old).name.startswith("test_")}


def moved_name(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name that `from module import name` becomes."""
    if f"{module}.{name}" in MODULES:
        home, _, renamed = MODULES[f"{module}.{name}"].rpartition(".")
        return home, renamed
    home, names = NAMES.get(module, ("", ()))
    return (home if name in names else MODULES.get(module, module)), name


def shielded(dotted: str) -> str:
    return dotted.replace("octavo_", f"octavo{SHIELD}", 1)


def rewrite_imports(text: str) -> str:
    """Rewrite each `from ... import ...` whose module or names move, as one line for each new module."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        homes: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = moved_name(node.module, alias.name)
            known_as = alias.asname or (alias.name if name != alias.name else None)
            homes.setdefault(home, []).append(name + (f" as {known_as}" if known_as else ""))
        if set(homes) == {node.module}:
            continue
        first, last = lines[node.lineno - 1], lines[(node.end_lineno or node.lineno) - 1]
        indent, comment = first[: node.col_offset], re.search(r"  #.*", last)
        new = [f"{indent}from {shielded(home)} import {', '.join(names)}" for home, names in homes.items()]
        if comment and len(new[0] + comment[0]) <= LINE_LENGTH:
            new[0] += comment[0]
        elif comment:
            new.insert(0, f"{indent}{comment[0].strip()}")
        lines[node.lineno - 1 : node.end_lineno] = ["\n".join(new) + "\n"] + [""] * (
            (node.end_lineno or node.lineno) - node.lineno
        )
    return "".join(lines)


def rewrite_dotted(match: re.Match[str]) -> str:
    parts = match[0].split(".")
    for length in range(len(parts), 1, -1):
        module, rest = ".".join(parts[:length]), parts[length:]
        if module in MODULES:
            home, names = NAMES.get(module, ("", ()))
            new = home if rest and rest[0] in names and module != "octavo_engine.runner.runner" else MODULES[module]
            return shielded(".".join([new, *rest]))
    return match[0]


def rewrite_path(match: re.Match[str]) -> str:
    """Rewrite a path that starts at the root, in `src`, in a package or in one of its rooms."""
    path = match[0]
    for folder in ("", "engine/src", "server/src", ENGINE, SERVER, "tests", "tests/unit"):
        old = f"{folder}/{path}".lstrip("/")
        if old in MOVES and "/" in path:
            return MOVES[old].removeprefix(folder).lstrip("/").replace("octavo_", f"octavo{SHIELD}")
    return str(Path(path).with_name(FILES[Path(path).name])) if Path(path).name in FILES else path


def rewrite(text: str, is_python: bool) -> str:
    text = rewrite_imports(text) if is_python else text
    text = DOTTED.sub(rewrite_dotted, text)
    text = PATH.sub(rewrite_path, text)
    text = LOGGER.sub(lambda match: STEMS.get(match[0], match[0]), text)
    text = text.replace(SHIELD, "_")
    for old, new in TEXTS.items():
        text = text.replace(old, new)
    return text


def cut(path: Path, names: tuple[str, ...]) -> str:
    """Remove definitions from a module and return their text."""
    text = path.read_text()
    lines, found = text.splitlines(keepends=True), []
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        if getattr(target, "id", getattr(target, "name", None)) in names:
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
            found.append("".join(lines[start : node.end_lineno]))
            lines[start : node.end_lineno] = [""] * ((node.end_lineno or 0) - start)
    if len(found) != len(names):
        raise SystemExit(f"{path}: {names} are not all defined there")
    path.write_text("".join(lines))
    return "\n\n".join(found)


def insert_after_imports(path: Path, text: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    last = max(node.end_lineno or 0 for node in ast.parse("".join(lines)).body if isinstance(node, ast.ImportFrom))
    path.write_text("".join([*lines[:last], "\n", text, *lines[last:]]))


def use(path: Path, statement: str) -> None:
    """Add an import to a module that defined its names until now."""
    lines = path.read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("from octavo_engine"))
    path.write_text("".join([*lines[:first], f"{statement}\n", *lines[first:]]))


def move_names() -> None:
    engine = ROOT / ENGINE
    module, names = NAMES["octavo_engine.runner.batch"]
    classes = cut(engine / "runner/batch.py", names)
    (engine / "devices/step_inputs.py").write_text(STEP_INPUTS + classes)
    use(engine / "runner/batch.py", f"from {module} import {', '.join(names)}")
    if "\nMAX_LOGITS =" in (engine / "runner/runner.py").read_text():
        use(engine / "runner/runner.py", "from octavo_engine.sampling.sampler import MAX_LOGITS")
        insert_after_imports(engine / "sampling/sampler.py", cut(engine / "runner/runner.py", ("MAX_LOGITS",)))
    insert_after_imports(engine / "process/client.py", cut(engine / "loop/start.py", ("DEFAULT_LOADER",)))


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def files_without_a_room() -> list[str]:
    return [
        f"{folder}/{path.name}"
        for folder, names in STAYING.items()
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem.removeprefix(f"test_{Path(folder).name}_") not in names.split()
        and f"{folder}/{path.name}" not in MOVES
    ]


def main() -> int:
    if not (ROOT / ENGINE / "frontend.py").exists():
        raise SystemExit("the files are in their rooms already")
    if homeless := files_without_a_room():
        print("these files have no room:", *homeless, sep="\n", file=sys.stderr)
        return 1
    for old, new in MOVES.items():
        (ROOT / new).parent.mkdir(exist_ok=True)
        if new.startswith(("engine/", "server/")):
            (ROOT / new).parent.joinpath("__init__.py").touch()
        run("git", "mv", old, new)
    for name in run("git", "ls-files").splitlines():
        path = ROOT / name
        if path == Path(__file__) or path.is_symlink() or b"\0" in (data := path.read_bytes()):
            continue
        text = data.decode()
        new = rewrite(text, path.suffix == ".py")
        if new != text:
            path.write_text(new)
    move_names()
    (ROOT / "tests/router/conftest.py").write_text(ROUTER_FIXTURES)
    ruff = str(Path(sys.executable).with_name("ruff"))
    run(ruff, "check", "--select", "F401", "--fix", f"{ENGINE}/runner/batch.py")
    run(ruff, "check", "--select", "I", "--fix", ".")
    run(ruff, "format", ".")
    run("git", "add", ENGINE, SERVER, "tests")
    run("git", "add", "--update")
    return 0


if __name__ == "__main__":
    sys.exit(main())
