"""`python -m tools.compare A B`: whether runs are the same training, and where they begin to differ."""
