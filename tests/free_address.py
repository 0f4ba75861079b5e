"""Finds a free port of this machine."""

from tests.program import free_address as free_address
