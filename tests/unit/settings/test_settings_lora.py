"""The settings of adapters: forms of `lora_modules`, and refusals with value, limit and remedy."""

from pathlib import Path
from typing import Any

import pytest
from octavo_engine.settings.config import adapters_in_memory
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.settings.records import LoRAModule
from octavo_engine.wire.errors import StartupError

A, B = LoRAModule(name="a", path="/x"), LoRAModule(name="b", path="/y=z", base_model_name="m")
B_JSON = '{"name": "b", "path": "/y=z", "base_model_name": "m"}'


@pytest.mark.parametrize(
    ("value", "modules"),
    [
        (None, ()),
        ([], ()),
        ("a=/x", (A,)),
        (["a=/x", B_JSON], (A, B)),
        ('[{"name": "a", "path": "/x"}]', (A,)),
        ({"name": "a", "path": "/x"}, (A,)),
        ([A, {"name": "b", "path": "/y=z", "base_model_name": "m"}], (A, B)),
        ("b=/y=z", (LoRAModule(name="b", path="/y=z"),)),
    ],
    ids=str,
)
def test_forms_of_lora_modules(value: Any, modules: tuple[LoRAModule, ...]) -> None:
    assert resolve_config(enable_lora=True, lora_modules=value).lora_modules == modules


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": "a"}, "lora_modules='a' names no adapter"),
        ({"lora_modules": "=x"}, "names no adapter"),
        ({"lora_modules": "a="}, "names no adapter"),
        ({"lora_modules": [5]}, "lora_modules=5"),
        ({"lora_modules": "{"}, "not valid JSON"),
        ({"lora_modules": {"name": "a"}}, "path"),
        ({"lora_modules": {"name": "a", "path": 5}}, "`int`"),
        ({"lora_modules": {"name": "", "path": "x"}}, "empty"),
        ({"lora_modules": {"name": "a", "path": "x", "rank": 5}}, "no field 'rank'"),
        ({"lora_modules": ["a=x", "a=y"]}, "'a' twice"),
        ({"lora_modules": f"{'n' * 129}=x"}, "129 bytes; the limit is 128"),
        ({"lora_modules": "m=x", "served_model_name": ["k", "m"]}, "'m' is the name of the served model"),
        ({"lora_modules": "base=x", "model": "base"}, "'base' is the name of the served model"),
        ({"lora_modules": [f"{i}=x" for i in range(4097)]}, "4097 adapters exceed the limit of 4096"),
        ({"lora_modules": "a=x", "enable_lora": False}, "needs --enable-lora"),
        ({"max_loras": 0}, "max_loras must be between 1 and 1024, got 0"),
        ({"max_cpu_loras": 0}, "max_cpu_loras must be between 1 and 1024, got 0"),
        ({"max_lora_rank": 0}, "max_lora_rank must be between 1 and 1024, got 0"),
        ({"enable_prompt_adapter": True}, "prompt adapters are not served"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_config(**{"enable_lora": True, **settings})
    assert words in str(caught.value)


@pytest.mark.parametrize(("settings", "number"), [({}, 8), ({"max_loras": 2}, 2), ({"max_cpu_loras": 4}, 4)])
def test_max_loras_is_the_default_of_max_cpu_loras(settings: dict[str, Any], number: int) -> None:
    assert adapters_in_memory(resolve_config(enable_lora=True, lora_modules=["a=x"], **settings)) == number


def test_paths_may_be_path_objects() -> None:
    config = resolve_config(enable_lora=True, lora_modules=[{"name": "a", "path": str(Path("x"))}])
    assert config.lora_modules[0].path == "x"
