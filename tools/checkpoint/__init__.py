"""`python -m tools.checkpoint`: lists, verifies, shows, compares, imports and exports checkpoints."""
