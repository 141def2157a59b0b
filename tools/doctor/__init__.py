"""Inspect this machine: what it has, what will fail or be slow in a run, and how to fix it."""
