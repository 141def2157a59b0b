"""The planner: predicts memory and step time of plans, and searches for the best, without running them."""
