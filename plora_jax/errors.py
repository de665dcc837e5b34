"""The one exception for input that is wrong: the person reading it can mend it."""


class UserError(Exception):
    """Say what was wrong, where (file, line, field), what is allowed and what to do next.

    The command line prints the message alone and exits with code 2; nothing has been written by then.
    """
