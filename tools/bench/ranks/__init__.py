"""Count what start-up and resume of thousands of ranks cost, by the real code in few processes."""
