"""What the package raises for misuse. Capacity is never among it: shortage is a result.

ValueError
  HandleError       a slot or lease that is stale, foreign or in the wrong state
AssertionError
  InvariantError    check() found the cache at odds with itself: a defect of this package
"""


class HandleError(ValueError):
    """A slot or lease was used after its end, with another pool, or before its content was defined."""


class InvariantError(AssertionError):
    """The cache is at odds with itself."""
