"""A setting is declared once, as a field of a record: its flag, help, range, variable and value follow."""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from octavo_engine.settings.arg_types import comma_list, json_list, json_object, seconds, size_or_auto
from octavo_engine.settings.declare import Declared, all_settings, setting
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.config_file import ConfiguredParser
from octavo_server.cli.declared_flags import add_flags, flags_of, record_of
from octavo_testing.usage_errors import usage_error

Dtype = Literal["auto", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Declared):
    max_things: int = setting(7, "Number of things.", ge=1, le=9, env=("A_THINGS", "B_THINGS"))
    level: Literal[0, 1, 2] = setting(0, "Level.", env=("A_LEVEL",))
    is_loud: bool = setting(False, "Noise.", env=("A_NOISE",))
    tags: tuple[str, ...] = setting((), "Tags.", env=("A_TAG",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Declared):
    """Every kind of declaration that the engine, the server and the router have."""

    tensor_parallel_size: int = setting(1, "Ranks.", group="model: It computes.", flags=("-tp",), ge=1)
    max_len: int | None = setting(None, "Tokens.", parse=size_or_auto, unset="auto")
    max_queue: int | None = setting(8192, "Requests.", parse=size_or_auto)
    share: float | None = setting(None, "Share.", ge=0.01, le=1.0, unset="0.9 on a GPU")
    dtype: Dtype = setting("auto", "Type.", aliases={"half": "float16"})
    quantization: Dtype | None = setting(None, "Weights.", flags=("-q",), parse=str, aliases={"half": "float16"})
    draft: dict[str, Any] = setting(dict, "JSON.", parse=json_object)
    fields: dict[str, Any] = setting({}, "JSON.", parse=json_object)
    is_async: bool | None = setting(None, "Overlap.", unset="on one GPU")
    sizes: tuple[int, ...] = setting((), "Sizes.", metavar="N", convert=lambda sizes: tuple(sorted(sizes)))
    few: tuple[int, ...] = setting((), "Few.", ge=1, le=4)
    names: tuple[str, ...] = setting((), "Names.", group="access")
    key: tuple[str, ...] = setting(tuple, "Keys.", repeats=True, secret=True)
    methods: tuple[str, ...] = setting(("*",), "Methods.", parse=json_list, unset="all")
    paths: tuple[str, ...] = setting((), "Paths.", parse=comma_list)
    socket: Path | None = setting(None, "Socket.")
    wait: float = setting(30.0, "Seconds.", parse=seconds, flags=("--pause",))
    host: str | None = setting(None, "Address.", metavar=None)
    inner: Inner = field(default_factory=Inner)
    plain: int = 5


def parser():
    made = ConfiguredParser(prog="test", allow_abbrev=False)
    add_flags(made, Outer)
    return made


def record(*argv, **chosen):
    return record_of(Outer, parser().parse_args(argv), **chosen)


def test_without_flags_every_field_has_its_default():
    assert record() == Outer()
    assert record(plain=6, inner=Inner(max_things=8)) == Outer(plain=6, inner=Inner(max_things=8))


CASES = [
    (["-tp", "2"], "tensor_parallel_size", 2),
    (["--tensor_parallel_size=2"], "tensor_parallel_size", 2),
    (["--max-len", "32k"], "max_len", 32_000),
    (["--max-len", "auto"], "max_len", None),
    (["--max-queue", "-1"], "max_queue", None),
    (["--share", "0.5"], "share", 0.5),
    (["--dtype", "half"], "dtype", "float16"),
    (["-q", "half"], "quantization", "float16"),
    (["--draft", '{"a_b": 4}'], "draft", {"a_b": 4}),
    (["--draft.a_b", "4", "--draft.c", "x"], "draft", {"a_b": 4, "c": "x"}),
    (["--no-is-async"], "is_async", False),
    (["--sizes", "4", "2"], "sizes", (2, 4)),
    (["--names", "a", "--names", "b", "c"], "names", ("b", "c")),
    (["--key", "a", "--key", "b", "c"], "key", ("a", "b", "c")),
    (["--methods", '["GET"]'], "methods", ("GET",)),
    (["--paths", "/a, /b"], "paths", ("/a", "/b")),
    (["--socket", "/s"], "socket", Path("/s")),
    (["--pause", "3"], "wait", 3.0),
    (["--max-things", "9", "--max-things", "8"], "inner", Inner(max_things=8)),
    (["--level", "2", "--is-loud"], "inner", Inner(level=2, is_loud=True)),
]


@pytest.mark.parametrize(
    ("argv", "name", "value"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_flag_sets_its_field(argv, name, value):
    assert record(*argv) == record(**{name: value})


@pytest.mark.parametrize(
    ("argv", "name", "value"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_the_flags_of_parsed_values_give_the_same_record(argv, name, value):
    again = list(flags_of(Outer, parser().parse_args(argv)))
    assert record(*again) == record(**{name: value})
    assert list(flags_of(Outer, parser().parse_args(argv), but={name, "max_things", "level", "is_loud"})) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tensor-parallel-size", "0"], "argument --tensor-parallel-size/-tp: '0' must be at least 1"),
        (["--max-things", "10"], "argument --max-things: '10' must be between 1 and 9"),
        (["--share", "nan"], "argument --share: 'nan' must be between 0.01 and 1.0"),
        (["--share", "half"], "argument --share: 'half' is not a number, and must be between 0.01 and 1.0"),
        (
            ["--few", "-1"],
            "argument --few: '-1' is not a whole number (1024, 32k = 32000, 32K = 32768)",
        ),
        (["--few", "1", "5"], "argument --few: '5' must be between 1 and 4"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--level", "3"], "invalid choice: 3"),
        (["--wait", "-1"], "'-1' is not a number of seconds"),
        (["--shrae", "1"], "Did you mean --share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_names_flag_value_and_limit(argv, message, capsys):
    assert message in usage_error(capsys, parser().parse_args, argv)


def test_the_first_variable_that_is_set_counts_without_the_flag(monkeypatch):
    monkeypatch.setenv("A_THINGS", "")
    monkeypatch.setenv("B_THINGS", "4")
    monkeypatch.setenv("A_LEVEL", "2")
    monkeypatch.setenv("A_NOISE", "true")
    monkeypatch.setenv("A_TAG", "new")
    assert record().inner == Inner(max_things=4, level=2, is_loud=True, tags=("new",))
    monkeypatch.setenv("A_THINGS", "5")
    assert record().inner.max_things == 5
    argv = ("--max-things", "6", "--level", "0", "--no-is-loud", "--tags", "a", "b")
    assert record(*argv).inner == Inner(max_things=6, tags=("a", "b"))


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("B_THINGS", "many", "whole number"),
        ("B_THINGS", "10", "between 1 and 9"),
        ("A_LEVEL", "3", "one of 0, 1, 2"),
        ("A_NOISE", "loud", "true nor false"),
    ],
)
def test_an_error_names_a_wrong_variable_its_value_and_a_remedy(monkeypatch, name, text, limit):
    monkeypatch.setenv(name, text)
    with pytest.raises(StartupError, match=rf"\${name} is '{text}': .*{limit}.*unset"):
        record()


def test_help_has_groups_metavars_and_defaults():
    text = parser().format_help()
    assert "model:\n  It computes.\n" in text
    assert text.index("access:") > text.index("Sizes.")
    words = " ".join(text.split())
    for expected in (
        *("--tensor-parallel-size N, -tp N Ranks. Default: 1.", "--share X Share. Default: 0.9 on a GPU."),
        *("--sizes N [N ...] Sizes. Default: none.", "--methods JSON Methods. Default: all.", "--host HOST Address."),
        *("--dtype {auto,float16,float32,half} Type. Default: auto.", "--socket FILE Socket. Default: none."),
        *("--wait S, --pause S Seconds. Default: 30.", "Number of things. Default: $A_THINGS or $B_THINGS, else 7."),
        *("Overlap. Default: on one GPU.", "Noise. Default: $A_NOISE, else off."),
    ):
        assert expected in words


def test_flags_that_the_caller_adds_are_left_out():
    made = ConfiguredParser(prog="test", allow_abbrev=False)
    add_flags(made, Outer, but=("host", "max_things"))
    left_out = parser()._option_string_actions.keys() - made._option_string_actions.keys()
    assert left_out == {"--host", "--max-things"}


def test_a_path_is_text_and_stays_a_path_where_one_is_asked_for():
    declared = {each.name: each for each in all_settings(Outer)}
    assert [declared[name].checked(Path("/s")) for name in ("host", "socket")] == ["/s", Path("/s")]


def test_a_key_is_hidden():
    assert "secret" not in repr(record("--key", "secret"))


def test_a_declaration_with_an_unknown_part_is_refused():
    with pytest.raises(TypeError, match="least"):
        setting(1, "Things.", least=1)


@pytest.mark.parametrize(
    ("ge", "le", "bounds"), [(1, 2, "between 1 and 2"), (-math.inf, 2, "at most 2"), (1, math.inf, "at least 1")]
)
def test_bounds_are_inclusive_and_leave_out_none(ge, le, bounds):
    record = dataclass(type("Bounded", (), {"__annotations__": {"x": int}, "x": setting(1, "X.", ge=ge, le=le)}))
    (declared,) = all_settings(record)
    assert declared.bounds == bounds
    assert [declared.allows(value) for value in (None, 1, 2)] == [True, True, True]
    assert [declared.allows(value) for value in (0.999, 2.001)] == [ge < 1, le > 2]


def test_two_records_with_the_same_setting_are_refused():
    made = parser()
    with pytest.raises(argparse.ArgumentError, match="conflicting"):
        add_flags(made, Inner)


#: Command -> file, class and field of the record to which the line is added.
PLACES = {
    "serve": ("octavo_server.config", "class RequestLimits(BodyLimits):", "limits"),
    "route": ("octavo_server.router.settings", "class ForwardLimits(Declared):", "forward"),
    "both": ("octavo_server.config", "class BodyLimits(Declared):", "limits"),
}
LINE = 'max_dummies: int = setting(7, "Largest number of dummies.", group="toys", ge=1, le=9, env=("OCTAVO_DUMMIES",))'
SCRIPT = """
import contextlib, importlib.util, io, json, os, sys, types
name, place, line, field, command, page, yaml = sys.argv[1:]
spec = importlib.util.find_spec(name)
head, _, rest = open(spec.origin).read().partition(place)
docstring, end, fields = rest.partition('\"\"\"\\n')
sys.modules[name] = module = types.ModuleType(name)
exec(head + place + docstring + end + "\\n    " + line + "\\n" + fields, module.__dict__)

from octavo_engine.settings.config import EngineConfig
from octavo_server.cli.main import build_parser
from octavo_server.cli.route_flags import settings_of
from octavo_server.cli.serve import server_config_of

def value(*argv):
    args = build_parser().parse_args([command, *argv])
    record = settings_of(args) if command == "route" else server_config_of(args, EngineConfig(served_model_name=("m",)))
    return getattr(record, field).max_dummies

def printed(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        build_parser().parse_args([command, *argv])
    return " ".join(out.getvalue().split())

found = {"help": printed("--help"), "refusal": printed("--max-dummies", "10"), "near": printed("--max-dumies", "1")}
found |= {"default": value(), "flag": value("--max-dummies", "9"), "yaml": value("--config", yaml)}
os.environ["OCTAVO_DUMMIES"] = "8"
found["env"] = value()
docs = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("docs", page))
spec.loader.exec_module(docs)
found["rows"] = [" | ".join(row) for _, rows in docs.TABLES.values() for row in rows if "dummies" in row[0]]
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("place", "command"), [("serve", "serve"), ("route", "route"), ("both", "serve"), ("both", "route")]
)
def test_one_line_adds_a_setting(place, command, tmp_path):
    (tmp_path / "settings.yaml").write_text("max_dummies: 4\n")
    module, record, field = PLACES[place]
    page = Path(__file__).with_name("test_docs_limits.py")
    argv = (module, record, LINE, field, command, str(page), str(tmp_path / "settings.yaml"))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "toys: --max-dummies N Largest number of dummies. Default: $OCTAVO_DUMMIES, else 7." in found["help"]
    assert "argument --max-dummies: '10' must be between 1 and 9" in found["refusal"]
    assert "Did you mean --max-dummies" in found["near"]
    assert {key: found[key] for key in ("default", "flag", "yaml", "env")} == {
        "default": 7, "flag": 9, "yaml": 4, "env": 8,
    }  # fmt: skip
    (row,) = found["rows"]
    assert row.startswith("dummies | `--max-dummies` | 7")
