"""Prompts with images: the token ids are those of transformers' processors, and each image knows its span."""

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from octavo_engine.frontend import request_builder
from octavo_engine.frontend.request_builder import Frontend, TokenizedPrompt
from octavo_engine.media import image_prompts
from octavo_engine.media.picture import MAX_PIXELS, decode
from octavo_engine.media.processor_settings import read_processor_settings
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.pictures import BLUE, RED, empty_png, encoded, quarter
from octavo_testing.scripted import write_byte_model
from octavo_testing.vision_checkpoints import (
    IMAGE,
    STRING_TEMPLATE,
    VISION,
    VisionFiles,
    vision_config,
    vision_tokenizer,
    write_vision_files,
)
from PIL import Image
from transformers import AutoImageProcessor, Idefics3Processor, LlavaProcessor, PreTrainedTokenizerFast

IMAGE_ID, VOCAB_SIZE = vision_tokenizer().token_to_id(IMAGE), vision_tokenizer().get_vocab_size()
Load = Callable[..., Frontend]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a front end whose model has a part that sees. `sees`: False for one that takes only text."""

    def make(name: str = "smolvlm", *, sees: bool = True, files: VisionFiles | None = None, **config: Any) -> Frontend:
        chosen = files or VISION[name]
        folder = write_vision_files(tmp_path / name, chosen)
        config_file = write_byte_model(folder) / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"vocab_size": VOCAB_SIZE}))
        write_vision_files(folder, chosen)

        def served(config: EngineConfig, model_files: Any) -> Any:
            return replace(load_served_model(config, model_files), vision=vision_config(chosen) if sees else None)

        monkeypatch.setattr(request_builder, "load_served_model", served)
        return Frontend.load(EngineConfig(model=str(folder), load_format="dummy", **{"max_model_len": 2000, **config}))

    return make


def picture(width: int, height: int) -> Image.Image:
    return quarter(RED, size=(width, height))


def url(image: Image.Image) -> str:
    return "data:image/png;base64," + b64encode(encoded(image, "PNG")).decode()


def chat(frontend: Frontend, messages: list[Any], mm_processor_kwargs: Any = None, **options: Any) -> TokenizedPrompt:
    render = partial(frontend.template(None).render, **options)
    return frontend.tokenize_messages(messages, render, mm_processor_kwargs=mm_processor_kwargs)


def ask(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def image_part(width: int, height: int, detail: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture(width, height)), "detail": detail}}


def reference_ids(frontend: Frontend, name: str, text: str, images: list[Image.Image]) -> list[int]:
    """Token ids by transformers' whole processor, of the families whose processor needs no further packages."""
    folder = frontend.config.model
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vision_tokenizer(), pad_token="<pad>")
    options: dict[str, Any] = {"image_seq_len": 1}
    if name.startswith("llava"):
        tower, strategy = VISION[name].hf["vision_config"], VISION[name].hf.get("vision_feature_select_strategy")
        options = {"patch_size": tower["patch_size"], "num_additional_image_tokens": 1}
        options["vision_feature_select_strategy"] = strategy or "default"
    images_only = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    processor = (LlavaProcessor if name.startswith("llava") else Idefics3Processor)(images_only, tokenizer, **options)
    return list(processor(images=images, text=text, add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("name", ["llava", "llava_full", "idefics3"])
@pytest.mark.parametrize("sizes", [[], [(40, 30)], [(40, 30), (3, 90), (1, 1)]], ids=len)
def test_ids_equal_those_of_transformers(load: Load, name: str, sizes: list[tuple[int, int]]) -> None:
    frontend = load(name)
    images = [picture(*size) for size in sizes]
    text = "Compare " + " and ".join([IMAGE] * len(images)) + "\nplease."
    wanted = (
        reference_ids(frontend, name, text, images)
        if images
        else vision_tokenizer().encode(text.replace(IMAGE, "")).ids
    )
    by_text = frontend.tokenize({"prompt": text, "multi_modal_data": {"image": images}}, add_special_tokens=False)
    ids = vision_tokenizer().encode(text, add_special_tokens=False).ids
    by_ids = frontend.tokenize({"prompt_token_ids": ids, "multi_modal_data": {"image": images}})
    assert by_text.token_ids == by_ids.token_ids == wanted
    assert by_text.images == by_ids.images
    assert by_text.text == text


@pytest.mark.parametrize("name", list(VISION))
def test_spans_reach_from_the_first_token_of_an_image_to_its_last(load: Load, name: str) -> None:
    frontend = load(name)
    images = [picture(40, 30), picture(3, 90)]
    prompt = frontend.tokenize(
        {"prompt": f"{IMAGE} or {IMAGE}?", "multi_modal_data": {"image": images}, "cache_salt": "s"}
    )
    assert prompt.cache_salt == "s"
    settings = read_processor_settings(frontend.text_files)
    places: list[int] = []
    for image, source in zip(prompt.images, images, strict=True):
        span = prompt.token_ids[image.start : image.end]
        assert span[0] == span[-1] == IMAGE_ID
        assert image.digest == settings.digest(image.data)
        assert (decode(image.data, "image") == np.asarray(source)).all()
        places += range(image.start, image.end)
    outside = [token_id for place, token_id in enumerate(prompt.token_ids) if place not in places]
    assert IMAGE_ID not in outside
    resolved = frontend.resolve(SamplingParams())
    assert frontend.build(replace(prompt, cache_salt=""), resolved, request_id="r").images == prompt.images
    salted = frontend.build(prompt, resolved, request_id="r").images
    assert [image.data for image in salted] == [image.data for image in prompt.images]
    assert not {image.digest for image in salted} & {image.digest for image in prompt.images}


@pytest.mark.parametrize("name", ["smolvlm", "llava", "llava_full", "qwen2_vl"])
def test_parts_of_each_kind_and_their_order_reach_the_prompt(load: Load, name: str) -> None:
    frontend = load(name)
    first, second = picture(40, 30), quarter(BLUE, size=(3, 90))
    by_url = chat(frontend, [ask(image_part(40, 30), {"type": "image_url", "image_url": url(second)}, "Hi")])
    by_object = chat(
        frontend,
        [ask({"type": "image_pil", "image_pil": first}, {"type": "image_pil", "image_pil": second}, "Hi")],
    )
    assert by_url.token_ids == by_object.token_ids
    shown = [image.length for image in by_url.images]
    turned = chat(frontend, [ask({"type": "image_pil", "image_pil": second}, image_part(40, 30), "Hi")])
    assert [image.length for image in turned.images] == shown[::-1]
    assert [image.digest for image in turned.images] == [by_object.images[1].digest, by_url.images[0].digest]


ROLES: list[tuple[str, list[Any], str]] = [
    ("smolvlm", [{"role": "user", "content": "Hi"}], "<|im_start|>User: Hi<end_of_utterance>\nAssistant:"),
    (
        "smolvlm",
        [{"role": "assistant", "content": "Hm"}, {"role": "tool", "content": "42"}, ask("So?")],
        "<|im_start|>Assistant: Hm<end_of_utterance>\nTool: 42<end_of_utterance>\nUser: So?<end_of_utterance>\n"
        "Assistant:",
    ),
    ("llava_full", [ask("Look: ", image_part(9, 9), "What?")], f"user: Look: \n{IMAGE}\nWhat?\nassistant:"),
    ("llava", [ask("Look:", image_part(9, 9), "What?")], f"USER: {IMAGE}\nLook: What? ASSISTANT:"),
    (
        "qwen2_vl",
        [ask("Look: ", image_part(9, 9), "What?")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nLook: <|vision_start|>"
        f"{IMAGE}<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("smolvlm", [ask(image_part(9, 9), "What?")], f"<|im_start|>User:{IMAGE}What?<end_of_utterance>\nAssistant:"),
    (
        "smolvlm",
        [
            ask("Use it: ", image_part(9, 9), role="system"),
            ask(image_part(9, 9), "What?"),
            {"role": "assistant", "content": "A cat."},
            ask("Result: ", image_part(9, 9), role="tool"),
        ],
        f"<|im_start|>System: Use it: {IMAGE}<end_of_utterance>\nUser:{IMAGE}What?<end_of_utterance>\n"
        f"Assistant: A cat.<end_of_utterance>\nTool: Result: {IMAGE}<end_of_utterance>\nAssistant:",
    ),
]


@pytest.mark.parametrize(("name", "messages", "text"), ROLES)
def test_images_stand_where_the_template_puts_them(load: Load, name: str, messages: list[Any], text: str) -> None:
    prompt = chat(load(name), messages)
    assert prompt.text == text
    assert len(prompt.images) == text.count(IMAGE)


def test_a_template_that_shows_no_images_gets_their_token_in_the_text(load: Load) -> None:
    source = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}[{{ part.text }}]"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    frontend = load(files=replace(VISION["llava"], template=source))
    assert chat(frontend, [ask(image_part(9, 9), "What?")]).text == f"[{IMAGE}][What?]"


@pytest.mark.parametrize(("content_format", "text"), [("string", f"user: {IMAGE}\nHi\nassistant:"), ("openai", None)])
def test_a_content_format_that_is_set_holds_for_images(load: Load, content_format: str, text: str | None) -> None:
    """The template concatenates strings, so lists of parts make it fail."""
    frontend = load("llava_full")
    template = frontend.template(None, content_format)
    if text is not None:
        assert frontend.tokenize_messages([ask(image_part(9, 9), "Hi")], template.render).text == text
        return
    with pytest.raises(InvalidRequest, match="cannot render"):
        frontend.tokenize_messages([ask(image_part(9, 9), "Hi")], template.render)


def test_a_continued_message_may_end_with_an_image(load: Load) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = chat(load(), [ask("See"), ask("This: ", image_part(9, 9), role="assistant")], **options)
    assert prompt.text is not None
    assert prompt.text.endswith(f"Assistant: This: {IMAGE}")


@pytest.mark.parametrize("name", ["smolvlm", "llava", "llava_full", "qwen3_vl"])
def test_text_is_rendered_as_for_a_model_without_images(load: Load, name: str) -> None:
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [ask("Hi", "you")],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, ask("Bye")],
    ]
    seeing = load(name)
    shown = [chat(seeing, messages) for messages in conversations]
    assert shown == [chat(load(name, sees=False), messages) for messages in conversations]
    assert all("Hi" in (prompt.text or "") for prompt in shown)


DETAILS = {"smolvlm": 4, "idefics3": 1, "llava": 16, "internvl": 4, "mistral3": 64 * 43}
SMALL: dict[str, dict[str, Any]] = {"internvl": {"max_patches": 1}, "mistral3": {"size": {"longest_edge": 512}}}
LARGE = {"mistral3": {"size": {"longest_edge": 600}}}


@pytest.mark.parametrize("name", DETAILS)
def test_low_detail_shows_one_tile(load: Load, name: str) -> None:
    frontend = load(files=replace(VISION[name], image=VISION[name].image | LARGE.get(name, {})), max_model_len=9000)
    size = (1200, 800) if name == "mistral3" else (90, 60)
    prompts = {
        detail: chat(frontend, [ask(image_part(*size, detail), "Hi")]) for detail in (None, "auto", "high", "low")
    }
    small = SMALL.get(name, {"do_image_splitting": False})
    assert prompts[None] == prompts["auto"] == prompts["high"]
    assert prompts["low"].token_ids.count(IMAGE_ID) == DETAILS[name]
    if name == "llava":  # it shows every image so
        assert prompts["low"] == prompts[None]
        return
    assert prompts["low"].token_ids != prompts[None].token_ids
    by_kwargs = chat(frontend, [ask(image_part(*size), "Hi")], mm_processor_kwargs=small)
    assert by_kwargs == prompts["low"]
    assert prompts["low"].images[0].digest != prompts[None].images[0].digest
    assert json.loads(prompts["low"].images[0].kwargs) == small


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_low_detail_is_below_the_size_of_a_processor_without_a_setting(load: Load, name: str) -> None:
    settings = {key: value for key, value in VISION[name].image.items() if key != "size"}
    frontend = load(files=replace(VISION[name], image=settings), max_model_len=20_000)
    low, usual = (chat(frontend, [ask(image_part(1000, 500, detail))]).images[0] for detail in ("low", None))
    assert json.loads(low.kwargs) == {"size": {"longest_edge": 512}}
    assert low.length < usual.length


def test_a_detail_counts_for_its_image_only(load: Load) -> None:
    frontend = load("smolvlm")
    both = chat(frontend, [ask(image_part(90, 60, "low"), image_part(90, 60), "Hi")])
    low, high = (chat(frontend, [ask(image_part(90, 60, detail))]).images[0] for detail in ("low", None))
    assert [image.digest for image in both.images] == [low.digest, high.digest]
    assert [image.length for image in both.images] == [low.length, high.length]


def test_settings_of_the_start_count_for_prompts_and_chats(load: Load) -> None:
    smaller = {"size": {"longest_edge": 64}}
    frontend, plain = load("smolvlm", mm_processor_kwargs=smaller), load("smolvlm")
    given = {"prompt": IMAGE, "multi_modal_data": {"image": picture(90, 60)}}
    started = frontend.tokenize(given)
    asked = plain.tokenize({**given, "mm_processor_kwargs": smaller})
    assert started.token_ids == asked.token_ids != plain.tokenize(given).token_ids
    assert started.images[0].digest == asked.images[0].digest
    assert (started.images[0].kwargs, json.loads(asked.images[0].kwargs)) == ("", smaller)


LARGER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"size": {"longest_edge": 129}}),
    ({"size": {"longest_edge": 64}}, {"size": {"longest_edge": 128}}),
    ({"do_image_splitting": False}, {"do_image_splitting": True}),
]


@pytest.mark.parametrize(("started", "asked"), LARGER)
def test_a_request_never_gets_more_pixels_than_the_start_allows(
    load: Load, started: dict[str, Any], asked: dict[str, Any]
) -> None:
    frontend = load("smolvlm", mm_processor_kwargs=started)
    with pytest.raises(InvalidRequest, match=r"multi_modal_data.image\[0\], .* the server's settings allow") as caught:
        frontend.tokenize(
            {"prompt": IMAGE, "multi_modal_data": {"image": picture(90, 60)}, "mm_processor_kwargs": asked}
        )
    assert caught.value.param == "mm_processor_kwargs"


BAD_KWARGS: list[Any] = [
    {"max_pixels": 9},
    {"image_mean": [0, 0, 0]},
    {"do_rescale": True},
    {"size": 64},
    {"size": {}},
    {"size": {"longest_edge": 0}},
    {"size": {"longest_edge": True}},
    {"size": {"longest_edge": "64"}},
    {"size": {"shortest_edge": 64}},
    {"size": {"height": 64, "width": 64}},
    {"do_image_splitting": 1},
    [1],
    "x",
]


@pytest.mark.parametrize("kwargs", BAD_KWARGS, ids=str)
def test_settings_that_are_unknown_or_of_a_wrong_type_are_refused(load: Load, kwargs: Any) -> None:
    """Settings are checked at the start, and for a request also without images."""
    frontend = load("smolvlm")
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs") as caught:
        frontend.tokenize({"prompt": "Hi", "mm_processor_kwargs": kwargs})
    assert caught.value.param == "mm_processor_kwargs"
    with pytest.raises(StartupError, match=r"mm_processor_kwargs|size of the image processor"):
        load("smolvlm", mm_processor_kwargs=kwargs)


def test_the_limit_of_pixels_is_a_setting(load: Load) -> None:
    frontend = load("smolvlm", max_image_pixels=1200)
    assert chat(frontend, [ask(image_part(40, 30))]).images
    for part in (image_part(41, 30), {"type": "image_pil", "image_pil": picture(41, 30)}):
        with pytest.raises(InvalidRequest, match=r"41 x 30 pixels; the limit is 1200 .*--max-image-pixels") as caught:
            chat(frontend, [ask("Hi", part)])
        assert caught.value.param == "messages[0].content[1]"


REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "an image token in a text": ([ask("Hi"), {"role": "user", "content": f"a {IMAGE}"}], "messages[1].content", IMAGE),
    "an image token in a part": ([ask(image_part(9, 9), f"{IMAGE}")], "messages[0].content[1]", IMAGE),
    "an image token in an answer": ([{"role": "assistant", "content": IMAGE}], "messages[0].content", IMAGE),
    "an image token in arguments": (
        [
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": f'{{"a": "{IMAGE}"}}'}}],
            }
        ],
        "messages",
        "1 times for 0 images",
    ),
    "an address": ([ask({"type": "image_url", "image_url": "https://a.b/c"})], "messages[0].content[0]", "data URL"),
    "a video": ([ask({"type": "video_url", "video_url": {"url": ""}})], "messages[0].content[0]", "video_url"),
    "audio": ([ask({"type": "input_audio", "input_audio": {}})], "messages[0].content[0]", "input_audio"),
    "embeddings": ([ask({"type": "image_embeds", "image_embeds": ""})], "messages[0].content[0]", "image_embeds"),
    "no image": ([ask({"type": "image_pil", "image_pil": None})], "messages[0].content[0]", "PIL image"),
    "a damaged image": (
        [ask("Hi", {"type": "image_url", "image_url": "data:;base64,AAAA"})],
        "messages[0].content[1]",
        "PNG, JPEG",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_message(load: Load, case: str) -> None:
    messages, param, says = REFUSED[case]
    shows_calls = STRING_TEMPLATE.replace(
        "{% endfor %}",
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}",
    )
    frontend = load(files=replace(VISION["smolvlm"], template=shows_calls))
    with pytest.raises(InvalidRequest, match=says) as caught:
        chat(frontend, messages)
    assert caught.value.param == param


def test_a_template_that_omits_a_message_names_the_place_of_the_image(load: Load) -> None:
    source = "{{ messages[-1].content }}"
    frontend = load(files=replace(VISION["llava"], template=source))
    with pytest.raises(InvalidRequest, match="0 times for 1 images") as caught:
        chat(frontend, [ask("Hi", image_part(9, 9)), {"role": "user", "content": "What?"}])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (f"{IMAGE}", "1 times for 0 images"),
        ([65, IMAGE_ID], "1 times for 0 images"),
        ({"prompt": "Hi", "multi_modal_data": {"image": picture(9, 9)}}, "0 times for 1 images"),
        ({"prompt": f"{IMAGE}{IMAGE}", "multi_modal_data": {"image": picture(9, 9)}}, "2 times for 1 images"),
        ({"prompt_token_ids": [65], "multi_modal_data": {"image": picture(9, 9)}}, "0 times for 1 images"),
        ({"prompt_token_ids": [IMAGE_ID] * 16, "multi_modal_data": {"image": picture(9, 9)}}, "16 times for 1 images"),
    ],
    ids=["a token", "its id", "no token", "two tokens", "no id", "expanded ids"],
)
def test_a_prompt_has_one_image_token_for_each_image(load: Load, prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        load().tokenize(prompt)
    assert caught.value.param == "prompt"


def test_images_that_exceed_the_context_are_not_decoded(load: Load) -> None:
    damaged = encoded(picture(900, 30), "PNG")[:60]
    part = {"type": "image_url", "image_url": "data:;base64," + b64encode(damaged).decode()}
    frontend = load(max_model_len=19)
    with pytest.raises(ContextLengthExceeded) as caught:
        chat(frontend, [ask(part, "What?")])
    assert (caught.value.max_model_len, caught.value.num_input) == (19, 5 * 4)


def test_images_after_those_that_exceed_the_context_are_not_read(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    read, frontend = Mock(wraps=image_prompts.ImagePrompts.read), load(max_model_len=50)
    monkeypatch.setattr(image_prompts.ImagePrompts, "read", lambda *args: read(*args))
    with pytest.raises(ContextLengthExceeded) as caught:
        chat(frontend, [ask(*[image_part(900, 30)] * 100)])
    assert (caught.value.num_input, read.call_count) == (60, 3)


def test_a_line_that_the_processor_would_blow_up_is_refused(load: Load) -> None:
    line = "data:;base64," + b64encode(empty_png(60_000, 1)).decode()
    frontend = load("llava_full")
    with pytest.raises(InvalidRequest, match=f"scales to 60000 x 60000; the limits are 1 and {MAX_PIXELS}"):
        chat(frontend, [ask({"type": "image_url", "image_url": line})])


@pytest.mark.parametrize("size", [(201, 1), (3, 602)])
def test_qwen_refuses_an_image_that_is_too_narrow_and_takes_one_within_the_limit(
    load: Load, size: tuple[int, int]
) -> None:
    frontend = load("qwen2_vl")
    with pytest.raises(InvalidRequest, match=rf"has {size[0]} x {size[1]} pixels.*limit is 200 times: cut") as caught:
        chat(frontend, [ask("Hi", image_part(*size))])
    assert caught.value.param == "messages[0].content[1]"
    smaller = tuple(side if side < 9 else 200 * min(size) for side in size)
    assert chat(frontend, [ask("Hi", image_part(*smaller))]).images


def test_spans_of_qwen_have_the_grid_of_their_image(load: Load) -> None:
    """The shapes are those of transformers: an image of 40 x 30 pixels has 4 rows of 5 tokens of 8 x 8 pixels."""
    prompt = chat(load("qwen2_vl"), [ask(image_part(40, 30), image_part(16, 70))])
    assert [image.grid for image in prompt.images] == [(4, 5), (9, 2)]
    assert [image.length for image in prompt.images] == [20, 18]
    assert all(set(prompt.token_ids[image.start : image.end]) == {IMAGE_ID} for image in prompt.images)


def test_a_model_of_text_refuses_images_by_name(load: Load) -> None:
    frontend = load("smolvlm", sees=False)
    with pytest.raises(InvalidRequest, match="accepts only text: leave it out") as caught:
        frontend.tokenize({"prompt": IMAGE, "multi_modal_data": {"image": picture(9, 9)}})
    assert caught.value.param == "multi_modal_data.image[0]"
    with pytest.raises(InvalidRequest, match="accepts only text: leave it out") as caught:
        chat(frontend, [ask("Hi")], mm_processor_kwargs=SMALL)
    assert caught.value.param == "mm_processor_kwargs"
    with pytest.raises(InvalidRequest, match="'image_url'; this model accepts only text"):
        chat(frontend, [ask(image_part(9, 9))])
    assert frontend.tokenize(f"a{IMAGE}").token_ids == [*frontend.tokenize("a").token_ids, IMAGE_ID]


def test_a_template_without_the_front_end_refuses_images(load: Load) -> None:
    """Refuse images whose tokens no front end has put into the prompt."""
    template = load().template(None)
    with pytest.raises(InvalidRequest, match="'image_url'; images are accepted only by chat") as caught:
        template.render([ask(image_part(9, 9))])
    assert caught.value.param == "messages[0].content[0]"


def test_without_the_packages_text_works_and_an_image_names_the_command(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = image_prompts.find_spec
    monkeypatch.setattr(image_prompts, "find_spec", lambda name: None if name == "PIL" else found(name))
    frontend = load()
    assert "pip install 'octavo-engine[vision]'" in caplog.text
    assert frontend.tokenize("Hi").token_ids
    with pytest.raises(InvalidRequest, match=r"pip install 'octavo-engine\[vision\]'"):
        chat(frontend, [ask(image_part(9, 9))])


def test_without_the_settings_of_a_processor_text_works_and_an_image_names_the_file(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = load(files=replace(VISION["smolvlm"], image={}))
    assert "has no preprocessor_config.json" in caplog.text
    assert frontend.tokenize("Hi").token_ids
    for ask_about_image in (
        lambda: chat(frontend, [ask(image_part(9, 9))]),
        lambda: frontend.tokenize({"prompt": IMAGE, "multi_modal_data": {"image": picture(9, 9)}}),
    ):
        with pytest.raises(InvalidRequest, match=r"no preprocessor_config.json.*: add the file"):
            ask_about_image()
    with pytest.raises(InvalidRequest, match="1 times for 0 images"):
        frontend.tokenize(IMAGE)


@pytest.mark.parametrize("size", [(1, 400), (400, 1)])
def test_an_image_that_scaling_reduces_to_nothing_is_refused(load: Load, size: tuple[int, int]) -> None:
    frontend = load("pixtral")
    with pytest.raises(InvalidRequest, match=f"has {size[0]} x {size[1]} pixels.*cut the image") as caught:
        chat(frontend, [ask(image_part(*size))])
    assert caught.value.param == "messages[0].content[0]"


def test_a_family_without_a_rule_ends_the_start(load: Load) -> None:
    with pytest.raises(StartupError, match="'pixtral'"):
        load(files=replace(VISION["llava"], family="pixtral"))


def test_a_tokenizer_without_the_image_token_ends_the_start(load: Load, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_byte_model(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(StartupError, match="use the tokenizer of this model"):
        load(tokenizer=str(other))
