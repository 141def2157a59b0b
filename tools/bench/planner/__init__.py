"""Compare the planner's predictions with real runs, the real code, and published figures."""
