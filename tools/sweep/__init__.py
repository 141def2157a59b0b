"""`python -m tools.sweep SPEC.yaml`: run a training with several variants of its config, one after
another, and compare them in one HTML page."""
