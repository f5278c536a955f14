"""Scripts that measure and print a table; run as `python -m benchmarks.<name>`."""
