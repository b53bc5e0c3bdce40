"""The reference engine and its HTTP front, and the demo."""
