"""Fault tolerance: hangs, signals, crashes, values that are not finite, and out of memory."""
