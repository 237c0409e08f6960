"""What can go wrong on the command line, and how it is put into one line."""


class UsageError(ValueError):
    """A command line that cannot be meant: exit status 2."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after something was reported; its text says what there is: exit status 130."""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, with its type where the message says too little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "; ".join(lines)
    plain = isinstance(error, ValueError | OSError | NotImplementedError)
    if plain and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"
