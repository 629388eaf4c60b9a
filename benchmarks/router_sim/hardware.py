"""Models of one replica: duration of a step, size of the KV cache, and limits of latency that users expect.

A step takes `step_s` (reading weights, launching kernels) plus a time for each prefill token and each decoding
sequence. The figures are rounded from public ones or, for the CPU, from `benchmarks/`. Ratios between policies hardly
depend on them; seconds do.
"""

from dataclasses import dataclass

from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.hashing import root_hash

HASH_ROOT = root_hash("router-sim", "bf16", 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A request is good if its first token takes at most `ttft_s` and each other one `tpot_s` on average."""

    name: str
    step_s: float
    prefill_token_s: float
    decode_seq_s: float
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ttft_s: float
    tpot_s: float
    max_queued: int  # running and waiting requests of a replica; it answers 429 beyond

    def duration_s(self, num_prefill_tokens: int, num_decodes: int) -> float:
        return self.step_s + num_prefill_tokens * self.prefill_token_s + num_decodes * self.decode_seq_s

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_model_len=16384,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            hash_root=HASH_ROOT,
        )


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        # 7B in bf16: 15 GB of weights at 600 GB/s, 15 GFLOP a token at 65 TFLOP/s; 5.4 GB of KV, 56 KiB a token.
        Hardware(
            name="a10g-7b",
            step_s=0.028,
            prefill_token_s=0.00023,
            decode_seq_s=0.0002,
            num_blocks=6000,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            ttft_s=2.0,
            tpot_s=0.15,
            max_queued=128,
        ),
        # 8B in bf16: 16 GB of weights at 3.3 TB/s, 16 GFLOP a token at 500 TFLOP/s; 55 GB of KV, 128 KiB a token.
        Hardware(
            name="h100-8b",
            step_s=0.007,
            prefill_token_s=0.000032,
            decode_seq_s=0.00005,
            num_blocks=26000,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            ttft_s=0.5,
            tpot_s=0.05,
            max_queued=512,
        ),
        # SmolLM2-135M in bf16 on two CPU cores.
        Hardware(
            name="cpu-135m",
            step_s=0.009,
            prefill_token_s=0.00033,
            decode_seq_s=0.0006,
            num_blocks=4000,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            ttft_s=2.0,
            tpot_s=0.15,
            max_queued=128,
        ),
    )
}
