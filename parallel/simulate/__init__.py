"""Runs the real code on a fake process group to record its collectives and memory."""
