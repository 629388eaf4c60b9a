"""A model that is trained to name a colour answers about pictures of each form, through `LLM`."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.colour_llava import COLOURS, QUESTION, make_colour_llava
from octavo_testing.pictures import encoded, forms, grey_forms, quarter
from octavo_testing.vision_checkpoints import IMAGE

pytestmark = pytest.mark.slow

ONE_WORD = SamplingParams(temperature=0, max_tokens=1)
NAMES = list(forms(COLOURS["red"])), list(grey_forms(COLOURS["black"]))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_colour_llava(tmp_path_factory.mktemp("model"))
    llm = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64)
    yield llm
    llm.shutdown()


def by_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + b64encode(data).decode()}}


def ask(llm: LLM, *contents: list[Any]) -> list[str]:
    conversations = [[{"role": "user", "content": content}] for content in contents]
    return [output.outputs[0].text for output in llm.chat(conversations, ONE_WORD, use_tqdm=False)]


@pytest.mark.parametrize("name", NAMES[0])
def test_the_colour_of_a_picture_is_named(llm: LLM, name: str) -> None:
    colours = [colour for colour in COLOURS if colour != "green"]  # the colour of the rest
    assert ask(llm, *([by_url(forms(COLOURS[colour])[name]), QUESTION] for colour in colours)) == colours


@pytest.mark.parametrize("name", NAMES[1])
def test_black_and_white_are_named_in_pictures_without_colours(llm: LLM, name: str) -> None:
    pictures = [by_url(grey_forms(COLOURS[colour])[name]) for colour in ("black", "white")]
    assert ask(llm, *([picture, QUESTION] for picture in pictures)) == ["black", "white"]


def test_objects_of_a_script_are_named_by_generate_and_chat(llm: LLM) -> None:
    images = {name: quarter(COLOURS[name]) for name in ("red", "blue", "white")}
    text = f"USER: {IMAGE}\n{QUESTION} ASSISTANT:"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    prompts: list[dict[str, Any]] = []
    for image in images.values():
        prompts += [
            {"prompt": text, "multi_modal_data": {"image": image}},
            {"prompt": text, "multi_modal_data": {"image": [np.asarray(image)]}},
            {"prompt_token_ids": ids, "multi_modal_data": {"image": image}},
        ]
    outputs = llm.generate(prompts, ONE_WORD, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [name for name in images for _ in range(3)]
    assert ask(llm, *([{"type": "image_pil", "image_pil": image}, QUESTION] for image in images.values())) == [*images]


def test_a_damaged_image_is_refused_and_the_next_prompt_runs(llm: LLM) -> None:
    data = encoded(quarter(COLOURS["red"]), "PNG")
    with pytest.raises(InvalidRequest, match="send one of PNG"):
        ask(llm, [by_url(b"no image"), QUESTION])
    text = f"USER: {IMAGE}\n{QUESTION} ASSISTANT:"
    broken, good = ({"prompt": text, "multi_modal_data": {"image": each}} for each in (data[:-40], data))
    first, second = llm.generate([broken, good], ONE_WORD, use_tqdm=False)
    assert first.outputs[0].finish_reason == "error"
    assert first.error is not None
    assert "cannot be decoded" in first.error
    assert second.outputs[0].text == "red"
