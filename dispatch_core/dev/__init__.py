"""What development, tests, demo and benchmarks need and a running gateway or relay does not."""

__all__: list[str] = []
