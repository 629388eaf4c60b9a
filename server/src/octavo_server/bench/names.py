"""Names that the parser and the benchmarks share; a module of its own, so that `octavo --help` imports little."""

FILE_DATASETS = ("sharegpt", "custom", "burstgpt")
DATASETS = ("random", "prefix_repetition", *FILE_DATASETS)
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
