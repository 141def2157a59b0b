"""Benchmarks of real runs: `python -m tools.bench -h`. The folder records/ contains their records."""
