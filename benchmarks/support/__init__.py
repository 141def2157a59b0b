"""What several benchmarks share; no commands."""
