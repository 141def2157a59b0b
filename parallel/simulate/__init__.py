"""The real code on a fake process group: its collectives and its memory."""
