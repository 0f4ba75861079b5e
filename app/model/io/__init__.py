"""Reads checkpoints: model families, safetensors, GGUF files and the Hugging Face hub."""
