"""Labels of `cache_config_info`: the size of the KV cache in tokens, and the requests of full length that it holds."""

from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.metrics import METRICS
from octavo_server.engine_totals import cache_labels
from octavo_testing.scripted import ready_info


def test_the_labels_have_the_size_in_tokens_and_in_requests():
    config = EngineConfig(num_gpu_blocks_override=100, max_model_len=600, gpu_memory_utilization=0.5)
    (names,) = (metric.labels for metric in METRICS if metric.name == "cache_config_info")
    values = cache_labels(config, ready_info(config))
    assert dict(zip(names, values, strict=True)) == {
        "block_size": "16",
        "num_gpu_blocks": "100",
        "num_cpu_blocks": "0",
        "enable_prefix_caching": "True",
        "cache_dtype": "float32",
        "gpu_memory_utilization": "0.5",
        "swap_space": "0.0",
        "kv_cache_size_tokens": "1600",
        "kv_cache_max_concurrency": "2.63",
    }
