"""The planner: predict the memory and the step time of plans, and search for the best one, without running
them."""
