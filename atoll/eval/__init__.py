"""Measured accuracy: questions with known answers, asked of an engine in this process or of a server, and runs compared."""
