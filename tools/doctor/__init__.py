"""Inspect this machine: whether a run will fail or be slow here, how to fix it, and the facts."""
