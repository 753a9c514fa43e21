"""Measured speed: decode attention over its shapes, the whole engine beside another one, and servers under load."""
