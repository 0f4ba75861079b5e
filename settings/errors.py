"""The error for invalid input, as opposed to a bug."""


class InputError(ValueError):
    """A setting, file, model or data set cannot be used; raised before any device work.

    The message names what is wrong, what was got and expected, where it was set, and the way out. The command line
    prints it without a traceback and exits with code 2.
    """
