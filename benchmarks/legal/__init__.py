"""Tiny models, and shardings that train them as one process does."""
