"""Tiny models as people write and publish them, for the benchmark and the tests of models of one's own."""
