"""Runs user plug-ins (rewards, environments and tools) in processes that can be killed."""
