"""Records and displays a run: metrics, log files, console, timers, profiler and the copy in a bucket."""
