"""Fixtures of tests that start worker processes."""

from tests.reward.conftest import nothing_is_left as nothing_is_left
