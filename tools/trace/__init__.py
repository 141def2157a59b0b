"""`python -m tools.trace RUN`: what a profiled step did with its time."""
