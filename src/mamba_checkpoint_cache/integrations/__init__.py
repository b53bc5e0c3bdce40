"""Bridges to model libraries and engines. The core imports none of them."""
