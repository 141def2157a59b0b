"""The processes of a run: their ranks, their process group, and how they end."""
