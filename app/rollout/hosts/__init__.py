"""Workers of several hosts under the scheduler of host 0."""
