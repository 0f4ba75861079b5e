"""Coordination of the processes of several hosts: rendezvous, collectives, preemption, watchdog, shutdown."""
