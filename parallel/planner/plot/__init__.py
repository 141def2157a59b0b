"""A step as a picture."""
