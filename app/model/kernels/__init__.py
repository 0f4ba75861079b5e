"""Pallas kernels, one file for each platform and use; each is imported only where it runs."""
