"""Time and memory of the end-to-end objective, beside other ways to compute it: `python -m benchmarks.loss`."""
