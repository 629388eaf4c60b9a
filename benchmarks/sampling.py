"""Time of choosing the tokens of one step from logits, by kinds of requests.

Logits are normal, either with a few tokens far above the others, as those of trained models, or nearly flat. Each step
samples a copy, as sampling may overwrite logits; the copy is outside the measured time.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from octavo_engine.sampling.sampler import Sampler, SampleRows, SamplingColumns
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.wire.plan import NewSeq
from octavo_engine.wire.sampling import SamplingParams
from table import Samples, print_table, save_json

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 20, top-p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
}
PROMPT = [1, 2, 3]


def make_logits(rows: int, vocab: int, *, spread: float) -> torch.Tensor:
    """Return normal logits of this deviation, of which 20 in a row lie up to 16 higher; a spread of 0.1 has none."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=chance) * spread
    if spread >= 1:
        likely = torch.randint(vocab, (rows, 20), generator=chance)
        logits.scatter_add_(1, likely, 16 * torch.rand(rows, 20, generator=chance))
    return logits


def sample_rows(params: SamplingParams, rows: int, vocab: int) -> tuple[Sampler, SampleRows]:
    columns, seqs = SamplingColumns(rows), []
    for slot in range(rows):
        new = NewSeq(seq_id=slot, token_ids=PROMPT, num_prompt_tokens=len(PROMPT), params=params)
        tokens = np.array([*PROMPT, 0], dtype=np.int32)
        seqs.append(SeqState.from_new_seq(new, slot, tokens, vocab_size=vocab))
        columns.set(seqs[-1], slot)
    slots, positions = np.arange(rows, dtype=np.int64), np.full(rows, len(PROMPT), dtype=np.int64)
    return Sampler(columns), SampleRows(seqs=seqs, slots=slots, positions=positions, num_drafts=np.zeros_like(slots))


def measure(params: SamplingParams, logits: torch.Tensor, steps: int) -> Samples:
    """Return the milliseconds of each step after two that are not counted."""
    sampler, rows = sample_rows(params, *logits.shape)
    milliseconds = []
    for _ in range(steps + 2):
        copy = logits.clone()
        started = time.perf_counter()
        sampler.sample(copy, rows).results()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    return Samples(tuple(milliseconds[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the milliseconds of sampling per step.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="rows of a step. Default: 1 16 64")
    parser.add_argument("--vocab", type=int, default=49152, help="tokens of the vocabulary. Default: 49152")
    parser.add_argument("--steps", type=int, default=20, help="number of steps. Default: 20")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    results, cells = {}, []
    for shape, spread in (("peaked", 3.0), ("flat", 0.1)):
        for rows in arguments.rows:
            logits = make_logits(rows, arguments.vocab, spread=spread)
            for kind, params in KINDS.items():
                samples = measure(params, logits, arguments.steps)
                results[f"{shape}, {rows} rows, {kind}"] = samples
                cells.append((f"{shape}, {kind}", rows, str(samples)))
    print_table(f"Sampling, vocabulary {arguments.vocab}", ("logits, requests", "rows", "ms"), cells)
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
