"""The OpenAI-compatible HTTP server: the engine in a process of its own, requests around it; import the module you need."""
