"""KV formats: which bytes hold a row, and the arithmetic between rows and bytes."""
