"""Which sample decodes where and when: a state machine without jax, clock, threads or randomness of its own."""
