"""What a run does about hangs, signals, crashes, values that are not finite, and full memory."""
