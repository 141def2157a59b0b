"""Benchmarks of speed, memory and start-up: runs, their parts, and other trainers."""
