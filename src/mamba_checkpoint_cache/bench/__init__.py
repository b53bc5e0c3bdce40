"""Measurements: the codec, the tree, and how many prefixes a pool keeps reusable."""
