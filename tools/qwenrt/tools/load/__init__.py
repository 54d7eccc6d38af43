"""Load on an OpenAI-compatible server, ours or another: requests by a plan, their times, a summary."""
