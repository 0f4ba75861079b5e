"""Environments and tools that answer the policy between its turns."""
