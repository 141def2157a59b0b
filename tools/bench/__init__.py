"""Measurements of real runs: `python -m tools.bench -h`. Their records are in records/."""
