"""Names that both the parser and the benchmarks know; apart, so that `octavo --help` imports nothing else."""

FILE_DATASETS = ("sharegpt", "custom", "burstgpt")
DATASETS = ("random", "prefix_repetition", *FILE_DATASETS)
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
