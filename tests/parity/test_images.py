"""Models that take images against transformers in fp32, in every way of running a sequence.

The reference is one forward pass of transformers over the prompt with its images and the output. Greedy tokens prove
little, so log-probabilities are compared: of the prompt's tokens, and of the whole vocabulary where tokens are sampled.
Each test asserts by the engine's counters that its case has occurred.
"""

import json
import math
import shutil
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, RequestOutput, SamplingParams
from octavo_engine.frontend.beam_search import BeamSearchParams
from octavo_engine.models.vision_tower import VisionTower
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.recording import Recording
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.tiny_models import VOCAB
from octavo_testing.tiny_vision import (
    IMAGE,
    QUANTISED_IMAGE,
    TEXT,
    TINY_VISION,
    ImagePrompt,
    Reference,
    image_prompt,
    make_quantised_vision,
    make_tiny_vision,
    picture,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
LENGTH = 200
QUANTISED = Path(__file__).parents[1] / "unit" / "weights" / "quantised_checkpoints"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Case:
    folder: Path
    reference: Reference

    @contextmanager
    def llm(self, **arguments: Any) -> Iterator[LLM]:
        common: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "debug_invariants": True}
        common |= {"max_model_len": LENGTH, "num_gpu_blocks_override": 64}
        llm = LLM(str(self.folder), **(common | arguments))
        yield llm
        llm.shutdown()

    def distance(self, batch: list[ImagePrompt], outputs: list[RequestOutput]) -> float:
        """Return max |Δ log-probability| over the tokens of prompts, and over the vocabulary at sampled positions."""
        worst = 0.0
        for asked, request in zip(batch, outputs, strict=True):
            prompt = list(request.prompt_token_ids)
            for output in request.outputs:
                expected = self.reference.logits([*prompt, *output.token_ids], asked.images).log_softmax(-1)
                assert expected.std() >= 1
                ours = torch.tensor([[row[i].logprob for i in range(TEXT["vocab_size"])] for row in output.logprobs])
                worst = max(worst, (ours - expected[len(prompt) - 1 : -1]).abs().max().item())
            if request.prompt_logprobs is not None:
                found = torch.tensor([request.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))])
                wanted = expected[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
                worst = max(worst, (found - wanted).abs().max().item())
        return worst


@pytest.fixture(scope="module", params=TINY_VISION)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny_vision(request.param, tmp_path_factory.mktemp("vision"))
    return Case(folder, Reference(folder))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[ImagePrompt]:
    """Return prompts with 0 to 3 images: first, last, side by side and between texts, of several sizes."""
    tall, wide = picture(4, width=20, height=70), picture(5, width=64, height=64)
    return [
        image_prompt(text(21)),
        image_prompt(text(5, seed=1), picture(1), text(7, seed=2)),
        image_prompt(wide, text(3, seed=3), picture(2)),
        image_prompt(text(2, seed=4), picture(1), picture(3), text(9, seed=5), tall, text(1, seed=6)),
    ]


def generate(llm: LLM, batch: list[ImagePrompt], **fields: Any) -> list[RequestOutput]:
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": -1, "prompt_logprobs": 0} | fields
    return llm.generate([prompt.request for prompt in batch], SamplingParams(**params), use_tqdm=False)


def test_a_batch_with_images_equals_transformers(case: Case) -> None:
    with case.llm() as llm:
        outputs = generate(llm, prompts())
        assert llm.stats.preemptions == 0
    assert case.distance(prompts(), outputs) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_chunks_that_cut_images_equal_transformers(case: Case, tokens: int) -> None:
    with case.llm(max_num_batched_tokens=tokens, max_num_seqs=min(4, tokens)) as llm:
        outputs = generate(llm, prompts())
        assert llm.stats.steps >= sum(len(output.prompt_token_ids) for output in outputs) / tokens
    assert case.distance(prompts(), outputs) <= TOLERANCE


def test_hits_that_end_inside_an_image_equal_transformers(case: Case) -> None:
    """The first prompt's last full block ends inside its image; a new question about it hits as far as that block."""
    start, question = image_prompt(text(6, seed=7), picture(1)), image_prompt(text(6, seed=7), picture(1), text(19))
    with case.llm() as llm:
        (first,) = generate(llm, [start], max_tokens=1, prompt_logprobs=None)
        outputs = generate(llm, [question], prompt_logprobs=None)
    assert 6 < outputs[0].num_cached_tokens < len(first.prompt_token_ids)
    assert case.distance([question], outputs) <= TOLERANCE


def test_forked_outputs_with_images_equal_transformers(case: Case) -> None:
    with case.llm() as llm:
        outputs = generate(llm, prompts(), n=3, temperature=2.0, seed=7)
        assert llm.stats.cow_copies > 0
    assert any(len({tuple(o.token_ids) for o in output.outputs}) > 1 for output in outputs)
    assert case.distance(prompts(), outputs) <= TOLERANCE


@pytest.mark.parametrize(("mode", "swap_space"), [("swap", 0.01), ("recompute", 0.0)])
def test_preempted_sequences_with_images_equal_transformers(case: Case, mode: str, swap_space: float) -> None:
    blocks = -(-LENGTH // 16)
    with case.llm(num_gpu_blocks_override=blocks, preemption_mode=mode, swap_space=swap_space) as llm:
        outputs = generate(llm, prompts(), max_tokens=40, prompt_logprobs=None)
        stats = llm.stats
        assert stats.preemptions_swap if mode == "swap" else stats.preemptions_recompute
    assert case.distance(prompts(), outputs) <= TOLERANCE


def test_drafts_after_images_equal_transformers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_engine.loop.proposers.least_share", lambda num_seqs, costs: 0.0)
    batch = [image_prompt(text(7) * 3, picture(1), text(7) * 2), *prompts()]
    with case.llm(speculative_config=DRAFTS) as llm:
        outputs = generate(llm, batch, max_tokens=24)
        assert llm.stats.drafts > 0
    assert case.distance(batch, outputs) <= TOLERANCE


def test_beams_with_an_image_equal_transformers(case: Case) -> None:
    asked = prompts()[1]
    with case.llm() as llm:
        (first,) = generate(llm, [asked], max_tokens=1)
        (found,) = llm.beam_search([asked.request], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    length = len(first.prompt_token_ids)
    assert len(found.sequences) == 3
    for beam in found.sequences:
        expected = case.reference.logits(beam.tokens, asked.images).log_softmax(-1)[length - 1 : -1]
        total = expected.gather(1, torch.tensor(beam.tokens[length:])[:, None]).sum().item()
        assert beam.cum_logprob == pytest.approx(total, abs=4 * TOLERANCE)


def test_steps_planned_ahead_with_images_equal_transformers(case: Case) -> None:
    with case.llm(async_scheduling=True) as llm:
        outputs = generate(llm, prompts(), prompt_logprobs=None)
    assert case.distance(prompts(), outputs) <= TOLERANCE


def test_other_images_of_equal_size_share_no_block_from_their_first_token_on(case: Case) -> None:
    one, other = (image_prompt(text(16), picture(number), text(32, seed=8)) for number in (1, 2))
    with case.llm() as llm:
        generate(llm, [one], max_tokens=1, prompt_logprobs=None)
        (same,) = generate(llm, [one], max_tokens=1, prompt_logprobs=None)
        (different,) = generate(llm, [other], prompt_logprobs=None)
    assert same.prompt_token_ids == different.prompt_token_ids
    assert same.num_cached_tokens >= len(same.prompt_token_ids) - 16
    assert 16 <= different.num_cached_tokens < 16 + 16, "text before the image, as marks of its first tile, is shared"
    assert case.distance([one, other], [same, different]) <= TOLERANCE


def test_text_only_requests_equal_the_text_model_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Also beside a request with an image, in the same steps."""
    ours = case.reference.model
    text_config = ours.config.text_config
    if "_vl_" in text_config.model_type:  # Qwen-VL: without images it is Qwen 2 or 3
        keys = text_config.to_dict() | {"tie_word_embeddings": ours.config.tie_word_embeddings}
        text_config = AutoConfig.for_model(keys.pop("model_type")[:5], **keys)
    text_model = AutoModelForCausalLM.from_config(text_config).eval()
    text_model.base_model.load_state_dict(ours.base_model.get_decoder().state_dict())
    text_model.get_output_embeddings().load_state_dict(ours.get_output_embeddings().state_dict())
    text_model.save_pretrained(tmp_path / "text")
    shutil.copy(case.folder / "tokenizer.json", tmp_path / "text")
    batch = [image_prompt(text(length, seed=length)) for length in (21, 40, 7)]
    with case.llm() as llm:
        sees = generate(llm, batch)
        beside = generate(llm, [*batch, prompts()[1]])[:3]
    with replace(case, folder=tmp_path / "text").llm() as llm:
        reads = generate(llm, batch)
    assert rows(sees) == rows(reads) == rows(beside)


def rows(outputs: list[RequestOutput]) -> list[Any]:
    """Return all log-probabilities of outputs, and their tokens."""
    return [
        (output.outputs[0].token_ids, [{token: entry.logprob for token, entry in row.items()} for row in found])
        for output in outputs
        for found in (output.outputs[0].logprobs, output.prompt_logprobs[1:])
    ]


def test_a_tower_that_fails_for_one_image_ends_its_request_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request computes the image in chunks; asked again, the image is computed again."""
    bad_picture = picture(9, width=64, height=20)
    bad, good = image_prompt(text(5), bad_picture, text(7)), prompts()[1:]
    shown, encode = case.reference.arrays(bad_picture)["pixel_values"], VisionTower.encode

    def fail(tower: VisionTower, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = inputs["pixel_values"]
        is_bad = found.numel() == shown.numel() and found.flatten().allclose(shown.flatten(), atol=1e-5)
        return encode(tower, inputs) * (math.nan if is_bad else 1)

    with case.llm(max_num_batched_tokens=16) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(VisionTower, "encode", fail)
            failed, *outputs = generate(llm, [bad, *good])
        (again,) = generate(llm, [bad])
    assert failed.outputs[0].finish_reason == "error"
    assert failed.error is not None
    assert case.distance([*good, bad], [*outputs, again]) <= TOLERANCE


def test_a_conversation_with_images_equals_transformers(case: Case) -> None:
    shown = picture(1)
    url = "data:image/png;base64," + b64encode(shown).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
        {"type": "image_pil", "image_pil": Image.open(BytesIO(shown))},
    ]
    conversation = [{"role": "user", "content": parts}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1, prompt_logprobs=0)
    params.logit_bias = {IMAGE: -100.0}  # the reference would look for its image
    with case.llm(max_model_len=256) as llm:
        outputs = llm.chat(conversation, params, use_tqdm=False)
    assert case.distance([ImagePrompt([], [shown, shown])], outputs) <= TOLERANCE


def test_an_image_that_cannot_be_decoded_ends_its_request_only(case: Case) -> None:
    bad, good = image_prompt(text(5), picture(1), picture(2)[:-60], text(7)), prompts()
    with case.llm() as llm:
        failed, *outputs = generate(llm, [bad, *good])
    assert failed.outputs[0].finish_reason == "error"
    assert str(failed.error).startswith("Image 2 of the prompt: ")
    assert case.distance(good, outputs) <= TOLERANCE


def test_an_engine_that_slept_sees_again(case: Case) -> None:
    with case.llm(enable_sleep_mode=True) as llm:
        generate(llm, prompts())
        llm.sleep(level=2)
        llm.wake_up()
        outputs = generate(llm, prompts())
    assert case.distance(prompts(), outputs) <= TOLERANCE


QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture
def qwen(case: Case) -> Case:
    if case.folder.name not in QWEN:
        pytest.skip("only Qwen-VL has positions of two dimensions, and published configs that are flat")
    return case


@pytest.mark.parametrize("size", [(64, 32), (30, 50), (16, 160), (300, 10), (9, 270), (1, 1)], ids=str)
def test_images_of_all_shapes_and_the_text_after_them_equal_transformers(qwen: Case, size: tuple[int, int]) -> None:
    batch = [image_prompt(text(5), picture(3, width=size[0], height=size[1]), text(3, seed=9))]
    with qwen.llm() as llm:
        outputs = generate(llm, batch, max_tokens=60, logit_bias={IMAGE: -100.0})
    assert qwen.distance(batch, outputs) <= TOLERANCE


@pytest.mark.skipif(native_library() is None, reason="the kernels are not available")
def test_decode_steps_after_an_image_are_replayed(qwen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities equal those of eager steps. Steps in fp32 are never recorded."""
    replays, replay = list[None](), Recording.replay

    def count(recording: Recording) -> None:
        replays.append(None)
        replay(recording)

    monkeypatch.setattr(Recording, "replay", count)
    found, num_replays = [], []
    for is_eager in (True, False):
        with qwen.llm(dtype="bfloat16", enforce_eager=is_eager) as llm:
            outputs = generate(llm, prompts(), max_tokens=20, prompt_logprobs=None)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
        num_replays.append(len(replays))
    assert found[0] == found[1]
    assert num_replays[0] == 0
    assert num_replays[1] >= 15


@pytest.mark.parametrize("named", ["model.language_model.", "model."])
def test_both_layouts_of_published_files_give_equal_answers(qwen: Case, tmp_path: Path, named: str) -> None:
    """Old files have names of a text model and `visual` beside them, and a config without `text_config`."""
    folder = shutil.copytree(qwen.folder, tmp_path / "model")
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = name.replace("language_model.", "").replace("model.visual.", "visual.")
        is_old = named == "model." or plain.startswith("lm_head")
        tower = plain if is_old else f"model.{plain}"
        tensors[tower if plain.startswith("visual.") else plain if is_old else plain.replace("model.", named)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if named == "model." and config["model_type"] != "qwen3_vl":
        part = config.pop("text_config") | {"rope_scaling": {"type": "mrope"}}
        rope = part.pop("rope_parameters")
        part["rope_scaling"]["mrope_section"], part["rope_theta"] = rope["mrope_section"], rope["rope_theta"]
        config = part | config
        config["vision_config"]["model_type"] = config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with qwen.llm() as llm:
        wanted = generate(llm, prompts())
    with replace(qwen, folder=folder).llm() as llm:
        assert rows(generate(llm, prompts())) == rows(wanted)


def test_random_weights_take_images(case: Case) -> None:
    with case.llm(load_format="dummy", dtype="bfloat16") as llm:
        outputs = generate(llm, prompts())
    assert [output.error for output in outputs] == [None] * len(outputs)


def test_without_settings_of_an_image_processor_text_runs_and_an_image_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_vision("smolvlm", tmp_path)
    reference = Reference(folder)
    (folder / "preprocessor_config.json").unlink()
    case, (reads, sees, *_) = Case(folder, reference), prompts()
    with case.llm() as llm:
        with pytest.raises(InvalidRequest, match=r"has no preprocessor_config\.json"):
            generate(llm, [sees])
        outputs = generate(llm, [reads])
    assert case.distance([reads], outputs) <= TOLERANCE


@pytest.mark.parametrize("family", ["llava", "pixtral", "mistral3", "internvl"])
@pytest.mark.parametrize("name", ["awq", "symmetric"])
def test_a_quantised_text_part_with_images_equals_transformers(tmp_path: Path, name: str, family: str) -> None:
    """`symmetric` is a checkpoint of GPTQ. The reference has the expanded weights of the text part."""
    folder = make_quantised_vision(family, QUANTISED / name, tmp_path)
    reference = Reference(tmp_path / "expanded")
    asked = image_prompt([3, 4, 5], picture(1), [6, 7, 8], image_token_id=QUANTISED_IMAGE)
    with Case(folder, reference).llm(max_model_len=64) as llm:
        (output,) = generate(llm, [asked], logprobs=None)
    prompt = list(output.prompt_token_ids)
    expected = reference.logits(prompt, asked.images).log_softmax(-1)
    found = [output.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]
    wanted = [expected[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
    assert found == pytest.approx(wanted, abs=TOLERANCE)
