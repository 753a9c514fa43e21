"""Tensors in, tensors out: the operations, importable and usable alone; knows no request, no pool and no model."""
