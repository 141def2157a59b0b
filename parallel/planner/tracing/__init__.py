"""Trace a module's operations, from the compiler's graph or eagerly."""
