"""Random histories of adapters: loads, rewritten folders, unloads, sleeps and more adapters than fit into the memory.

Every answer equals that of a fresh engine with the content that was loaded. A request fails only if no
folder has that content any more.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_engine import LLM, LoRARequest, SamplingParams
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 60, "num_threads": 1, "enable_sleep_mode": True, "enable_lora": True,
    "max_loras": 2,
}  # fmt: skip
PROMPT = {"prompt_token_ids": list(range(5, 30))}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FOLDERS, SEEDS = st.integers(0, 3), st.integers(0, 3)
ASKED = st.lists(st.tuples(FOLDERS, st.integers(1, 2), st.booleans()), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("write"), FOLDERS, SEEDS),
    st.tuples(st.just("ask"), ASKED),
    st.tuples(st.just("ask"), ASKED),
    st.tuples(st.just("unload"), st.integers(0, 7)),
    st.tuples(st.just("sleep"), st.sampled_from([1, 2])),
)


class History:
    def __init__(self, llm: LLM, folder: Path, answers: dict[int | None, list[int]]) -> None:
        self.llm, self.folder, self.answers = llm, folder, answers
        self.contents: dict[int, int] = {}
        self.loaded: dict[tuple[int, int], int] = {}  # seeds, by id and folder
        self.living: list[tuple[int, int]] = []  # seeds and folders of loads
        for index in range(4):
            self.write(index, index)

    def write(self, index: int, seed: int) -> None:
        self.contents[index] = seed
        write_adapter(self.folder / str(index), llama_pairs(seed=seed))

    def ask(self, asked: list[tuple[int, int, bool]]) -> None:
        """Ask adapters, given by folder, id and `load_inplace`, and the model itself in one batch."""
        requests = []
        for index, number, is_in_place in dict.fromkeys(asked):
            requests.append(LoRARequest("a", number, str(self.folder / str(index)), load_inplace=is_in_place))
            if is_in_place or (number, index) not in self.loaded:
                self.loaded[number, index] = self.contents[index]
                self.living.append((self.contents[index], index))
        expected = [self.loaded[request.lora_int_id, int(Path(request.lora_path).name)] for request in requests]
        outputs = self.llm.generate(
            [PROMPT] * (len(requests) + 1), GREEDY, use_tqdm=False, lora_request=[*requests, None]
        )
        assert list(outputs.pop().outputs[0].token_ids) == self.answers[None]
        for seed, output in zip(expected, outputs, strict=True):
            if output.error is None:
                assert list(output.outputs[0].token_ids) == self.answers[seed]
            else:
                assert output.error_kind == "unavailable"
                assert seed not in [self.contents[index] for known, index in self.living if known == seed]

    def unload(self, index: int) -> None:
        """Unload an adapter as the front end does for a name."""
        if not self.loaded:
            return
        number, folder = [*self.loaded][index % len(self.loaded)]
        seed = self.loaded.pop((number, folder))
        path = str(self.folder / str(folder))
        self.llm._core.unload_adapter(self.llm._adapters.pop((number, path)), path)
        self.living.remove((seed, folder))

    def unload_all(self) -> None:
        while self.loaded:
            self.unload(0)

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)
        self.llm.wake_up()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, list[int]]:
    """Return the answers of an engine that has started for them, of the model and with each adapter."""
    llm = LLM(str(model), **SETTINGS | {"max_loras": 8})
    folders = [write_adapter(tmp_path_factory.mktemp("fresh"), llama_pairs(seed=seed)) for seed in range(4)]
    adapters = [LoRARequest("a", 1, str(folder)) for folder in folders]
    outputs = llm.generate([PROMPT] * 5, GREEDY, use_tqdm=False, lora_request=[None, *adapters])
    llm.shutdown()
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert len(set(map(tuple, found))) == len(found)
    return dict(zip((None, *range(4)), found, strict=True))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), **SETTINGS)
    yield llm
    llm.shutdown()


@settings(max_examples=12)
@given(steps=st.lists(STEPS, min_size=6, max_size=14))
def test_answers_are_those_of_a_fresh_engine(
    llm: LLM, answers: dict[int | None, list[int]], steps: list[tuple[Any, ...]]
) -> None:
    with TemporaryDirectory() as folder:
        history = History(llm, Path(folder), answers)
        for name, *arguments in steps:
            getattr(history, name)(*arguments)
        history.unload_all()
