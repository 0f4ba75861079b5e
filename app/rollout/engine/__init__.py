"""Continuous batching: samples enter and leave decode slots that share a paged KV cache."""
