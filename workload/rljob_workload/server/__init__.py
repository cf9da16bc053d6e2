"""The OpenAI-compatible HTTP server of each replica, and what agents ask of it. Lives in the collector's process."""
