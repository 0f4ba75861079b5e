"""What keeps processes of several hosts together: rendezvous, collectives, preemption, watchdog, shutdown."""
