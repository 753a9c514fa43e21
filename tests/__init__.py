"""The tests: house rules (tree), small parts (unit), operations, models and the engine."""
