"""Whether a codec is good enough for a model, measured offline: restored states against exact ones, over the same tokens."""
