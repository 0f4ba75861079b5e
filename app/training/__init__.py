"""One training run: setup, initial state, the step, the step loop, replay."""
