"""Checkpoints of other tools as GGUF files."""
