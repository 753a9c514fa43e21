"""House rules, held by reading the source: nothing here imports torch or atoll."""
