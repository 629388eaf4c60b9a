"""Names that flags and benchmarks share. The flags import only this module, so that `octavo --help` starts fast."""

FILE_DATASETS = ("sharegpt", "custom", "burstgpt")
DATASETS = ("random", "prefix_repetition", *FILE_DATASETS)
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
