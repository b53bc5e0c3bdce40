"""The HTTP front: one idea per module."""
