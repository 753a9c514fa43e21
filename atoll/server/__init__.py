"""The OpenAI-compatible HTTP server: the engine on a thread of its own, requests around it; import the module you need."""
