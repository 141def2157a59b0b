"""Checkpoints: sharded saves, an atomic commit, verification and loading."""
