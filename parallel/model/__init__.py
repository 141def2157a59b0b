"""Models of others: described for planning, given values, and proved to compute the same when sharded."""
