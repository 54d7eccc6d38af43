"""The OpenAI-compatible server around AsyncLLM (needs the extra `serve`)."""
