"""`python -m tools.compare A B`: whether runs are the same training, and from which step on they differ."""
