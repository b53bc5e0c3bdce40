"""How wrong it got: logit distances, the budget, the guard that keeps it, and the sampled check of a serving engine."""
