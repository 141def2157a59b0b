"""Command-line tools that stand on top: each runs as `python -m tools.NAME`, and `-h` explains it."""
