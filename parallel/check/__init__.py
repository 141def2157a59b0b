"""Proves that a sharded model computes what the unsharded one does."""
