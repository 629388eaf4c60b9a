"""Logits equal transformers' in fp32 for each architecture and any split into steps; logits of mutants differ.

The reference is one forward pass of transformers over whole sequences of `LENGTH` tokens. A mutant is our model with
one error: the tolerance of the real tests must be far below the difference that each mutant makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from octavo_engine.layers.attention import SelfAttention
from octavo_engine.layers.embedding import LearnedPositions
from octavo_engine.layers.moe import MoE
from octavo_engine.layers.norm import HeadNorm, RMSNorm
from octavo_engine.models.decoder import Decoder
from octavo_engine.models.model import Model
from octavo_engine.models.registry import ARCHITECTURES, build_model
from octavo_engine.ops import reference
from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, WHOLE, expected_logits, max_distance
from octavo_testing.tiny_models import LENGTH, TINY, make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
MUTANT_DISTANCE = 1e-3
MIN_LOGIT_STD = 1.0


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    tokens: Tensor  # [2, LENGTH]
    expected: Tensor  # [2, LENGTH, vocab]

    def model(self, dtype: torch.dtype = torch.float32) -> Model:
        files = resolve_model(str(self.folder))
        config = load_model_config(files)
        model = build_model(config, dtype=dtype, device="cpu", max_model_len=TINY[self.name].max_model_len)
        model.load_weights(iter_weights(files))
        return model

    def distance(
        self, model: Model, chunks: tuple[list[int], list[int]], backend: AttentionBackend | None = None
    ) -> float:
        """Return max |Δlogit| over all positions of both sequences, run in steps of these numbers of tokens."""
        driver = PagedDriver(model, block_size=BLOCK, backend=backend)
        return max_distance(driver, self.tokens, self.expected, chunks)


@pytest.fixture(scope="module", params=TINY)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    tokens, expected = expected_logits(folder)
    return Case(request.param, folder, tokens, expected)


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("make_backend", [ReferenceBackend, CpuBackend])
def test_logits_equal_transformers(case: Case, make_backend: type[AttentionBackend], feed: str) -> None:
    model = case.model()
    model.finish_loading()
    backend = make_backend(model.kv_specs(), BLOCK, torch.float32)
    assert case.distance(model, FEEDS[feed], backend) <= TOLERANCE


def test_bfloat16_is_as_close_as_that_of_transformers(case: Case) -> None:
    """Both round at different places, so the errors of both against fp32 are compared.

    Rounding also decides between nearly equal experts, which changes single rows by chance: their median is compared.
    """
    model = case.model(torch.bfloat16)
    model.finish_loading()
    ours = PagedDriver(model).feed({seq: row.tolist() for seq, row in enumerate(case.tokens)})
    theirs = AutoModelForCausalLM.from_pretrained(case.folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        their_logits = theirs(case.tokens).logits.float()
    summarize = torch.median if _mixtures(model) else torch.mean
    our_error, their_error = (
        summarize((logits - case.expected).square().mean(-1)).sqrt()
        for logits in (torch.stack([ours[0], ours[1]]), their_logits)
    )
    assert our_error <= 1.25 * their_error, f"{our_error:.3f} against {their_error:.3f}"


def test_the_reference_logits_vary_enough(case: Case) -> None:
    assert case.expected.std() >= MIN_LOGIT_STD
    assert case.expected.std(dim=1).median() >= MIN_LOGIT_STD / 5  # over positions: the prefix matters


def test_all_architectures_have_a_tiny_model() -> None:
    dense = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "opt", "gpt2"}
    classes = dense | {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}
    assert {tiny.model_type for tiny in TINY.values()} == classes
    assert len(ARCHITECTURES) == len(classes)


Patch = pytest.MonkeyPatch
Mutation = Callable[[Model, Patch], bool]


def _attentions(model: Model) -> list[SelfAttention]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


def _mixtures(model: Model) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def no_rope(model: Model, patch: Patch) -> bool:
    patch.setattr("octavo_engine.ops.attention.rotate_", lambda x, cos, sin: None)
    return isinstance(model, Decoder)


def unscaled_rope(model: Model, patch: Patch) -> bool:
    """Rebuild the tables as if the checkpoint had no scaling."""
    if not isinstance(model, Decoder):
        return False
    scaled = False
    for rope, spec in zip(model.ropes, model.spec_of(model.config).ropes, strict=True):
        scaled |= spec.kind != "default"
        rope.__init__(replace(spec, kind="default"), model.build)
    return scaled


def original_length_rope(model: Model, patch: Patch) -> bool:
    """Rebuild the tables as transformers does for the first tokens of a sequence."""
    if not isinstance(model, Decoder):
        return False
    applies = False
    for rope, spec in zip(model.ropes, model.spec_of(model.config).ropes, strict=True):
        applies |= spec.kind in ("dynamic", "longrope") and spec.original_positions < LENGTH
        if applies:
            rope.table = type(rope)(replace(spec, scaling=_as_if_short(spec)), model.build).table
    return applies


def _as_if_short(spec) -> dict:
    scaling = dict(spec.scaling)
    return scaling | {"factor": 1.0} if spec.kind == "dynamic" else scaling | {"long_factor": scaling["short_factor"]}


def swapped_rope_bases(model: Model, patch: Patch) -> bool:
    if not isinstance(model, Decoder) or len(model.ropes) < 2:
        return False
    model.rope_idx = tuple(1 - idx for idx in model.rope_idx)
    return True


def shifted_positions(model: Model, patch: Patch) -> bool:
    tables = [module for module in model.modules() if isinstance(module, LearnedPositions)]
    for table in tables:
        table.table = table.table.roll(1, 0)
    return bool(tables)


def blind_to_itself(model: Model, patch: Patch) -> bool:
    return _shifted_mask(patch, -1)


def sees_the_next(model: Model, patch: Patch) -> bool:
    return _shifted_mask(patch, 1)


def _shifted_mask(patch: Patch, shift: int) -> bool:
    real = reference.causal_mask

    def mask(query_len: int, seq_len: int, window: int | None) -> Tensor:
        shifted = real(query_len, seq_len + shift, window)
        whole = torch.zeros(query_len, seq_len, dtype=torch.bool)
        width = min(seq_len, seq_len + shift)
        whole[:, :width] = shifted[:, :width]
        whole[:, 0] |= ~whole.any(1)  # a query that sees nothing would be NaN, which compares as no distance
        return whole

    patch.setattr(reference, "causal_mask", mask)
    return True


def _window_changed_by(model: Model, change: int) -> bool:
    windowed = [a for a in _attentions(model) if a.spec.kv.window is not None]
    for attention in windowed:
        kv = replace(attention.spec.kv, window=attention.spec.kv.window + change)
        attention.spec = replace(attention.spec, kv=kv)
    return bool(windowed)


def window_one_longer(model: Model, patch: Patch) -> bool:
    return _window_changed_by(model, 1)


def window_one_shorter(model: Model, patch: Patch) -> bool:
    return _window_changed_by(model, -1)


def windows_on_the_other_layers(model: Model, patch: Patch) -> bool:
    specs = [a.spec for a in _attentions(model)]
    found = {spec.kv.window for spec in specs}
    if len(found) == 1:
        return False
    window = max(w for w in found if w is not None)
    for attention in _attentions(model):
        kv = replace(attention.spec.kv, window=window if attention.spec.kv.window is None else None)
        attention.spec = replace(attention.spec, kv=kv)
    return True


def no_attention_softcap(model: Model, patch: Patch) -> bool:
    capped = [a for a in _attentions(model) if a.spec.softcap is not None]
    for attention in capped:
        attention.spec = replace(attention.spec, softcap=None)
    return bool(capped)


def no_final_softcap(model: Model, patch: Patch) -> bool:
    had = model.head.softcap is not None
    model.head.softcap = None
    return had


def scale_by_head_dim(model: Model, patch: Patch) -> bool:
    other = [a for a in _attentions(model) if a.spec.scale != a.spec.kv.head_dim**-0.5]
    for attention in other:
        attention.spec = replace(attention.spec, scale=attention.spec.kv.head_dim**-0.5)
    return bool(other)


def wrong_norm_offset(model: Model, patch: Patch) -> bool:
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    for norm in norms:
        norm.offset = 1.0 - norm.offset
    return bool(norms)


def wrong_head_norm_offset(model: Model, patch: Patch) -> bool:
    norms = [module for module in model.modules() if isinstance(module, HeadNorm)]
    for norm in norms:
        norm.offset = 1.0 - norm.offset
    return bool(norms)


def no_head_norm(model: Model, patch: Patch) -> bool:
    had = any(a.head_norm is not None for a in _attentions(model))
    for attention in _attentions(model):
        attention.head_norm = None
    return had


def unscaled_embedding(model: Model, patch: Patch) -> bool:
    had = model.embedding.scale != 1.0
    model.embedding.scale = 1.0
    return had


def unnormalised_top_k(model: Model, patch: Patch) -> bool:
    """Scale the weights of a row's experts where they must not be scaled, and the reverse."""
    for moe in _mixtures(model):
        moe.spec = replace(moe.spec, normalised=not moe.spec.normalised)
    return bool(_mixtures(model))


def one_expert_less(model: Model, patch: Patch) -> bool:
    for moe in _mixtures(model):
        moe.spec = replace(moe.spec, top_k=moe.spec.top_k - 1)
    return bool(_mixtures(model))


def experts_shifted_by_one(model: Model, patch: Patch) -> bool:
    for moe in _mixtures(model):
        moe.experts.each = [*moe.experts.each[1:], moe.experts.each[0]]
    return bool(_mixtures(model))


def no_shared_expert(model: Model, patch: Patch) -> bool:
    had = any(moe.shared is not None for moe in _mixtures(model))
    for moe in _mixtures(model):
        moe.shared = None
    return had


MUTATIONS: list[Mutation] = [
    no_rope,
    unscaled_rope,
    original_length_rope,
    swapped_rope_bases,
    shifted_positions,
    blind_to_itself,
    sees_the_next,
    window_one_longer,
    window_one_shorter,
    windows_on_the_other_layers,
    no_attention_softcap,
    no_final_softcap,
    scale_by_head_dim,
    wrong_norm_offset,
    wrong_head_norm_offset,
    no_head_norm,
    unscaled_embedding,
    unnormalised_top_k,
    one_expert_less,
    experts_shifted_by_one,
    no_shared_expert,
]


def test_every_mutant_differs_from_transformers(case: Case) -> None:
    distances = {}
    for mutate in MUTATIONS:
        model = case.model()
        with pytest.MonkeyPatch.context() as patch:
            if mutate(model, patch):
                model.finish_loading()
                distances[mutate.__name__] = case.distance(model, WHOLE)
    assert len(distances) >= 3
    assert {name: d for name, d in distances.items() if d <= MUTANT_DISTANCE} == {}
