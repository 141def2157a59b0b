"""Checkpoints that are whole and verified, or not there."""
