"""Measure this project and its predictions: `python -m benchmarks.NAME -h`. Records are in records/; support/
has no commands."""
