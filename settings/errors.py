"""The one error that means "your input, not our bug"."""


class InputError(ValueError):
    """A setting, file, model or data set that cannot be used; found before any device work.

    The message says what, got, expected, where it was set and what to do. The command line prints
    it alone, without a traceback, and exits with code 2.
    """
