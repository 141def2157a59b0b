"""`python -m tools.trace RUN`: how a profiled step spent its time."""
