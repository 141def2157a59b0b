"""What the planner says, held against real runs, the real code, and published figures."""
