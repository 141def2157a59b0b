"""What this machine has, what of it will fail or be slow, and how to mend it."""
