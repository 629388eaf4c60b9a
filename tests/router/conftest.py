from octavo_testing.core_server import core_config, core_server, scripted_tmp

__all__ = ["core_config", "core_server", "scripted_tmp"]
