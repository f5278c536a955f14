"""Checks the ops at real shapes, then times them: `python -m pallas_kernels.bench --help`."""
