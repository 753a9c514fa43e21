"""Measured speed: decode attention over its shapes, and the whole engine beside another one."""
