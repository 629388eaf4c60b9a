"""Packages that benchmarks need and `make up` does not install. Without one, a script ends with one line."""

try:
    import psutil
except ModuleNotFoundError as error:
    remedy = "make setup-dev, or pip install psutil"
    raise SystemExit(f"benchmarks need the Python package {error.name}: {remedy}") from None

__all__ = ["psutil"]
