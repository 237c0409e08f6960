"""What can go wrong on the command line, and how it is put into one line."""

from dllm_jax.engine.layout import DeviceFailure

NOTHING_FINISHED = "interrupted; nothing was finished"


class UsageError(ValueError):
    """A command line that cannot be meant: exit status 2."""


class Interrupted(KeyboardInterrupt):
    """A signal; its text says what there is, the exit status is 128 and its number."""

    def __init__(self, message: str = NOTHING_FINISHED, number: int = 2):
        super().__init__(message)
        self.number = number

    def saying(self, message: str) -> "Interrupted":
        """The same with other words."""
        return Interrupted(message, self.number)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, with its type where the message says too little."""
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":  # a narrow terminal
        return (
            f"{error.object[error.start]!r} cannot be written as {error.encoding}; "
            "set PYTHONIOENCODING=utf-8, or a locale with UTF-8"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, DeviceFailure):
        lines = lines[:1]  # what follows is a table of allocations
    text = "; ".join(lines)
    plain = isinstance(error, ValueError | OSError | NotImplementedError | DeviceFailure)
    if plain and text:
        return text
    return f"{type(error).__name__}: {text or 'no message'} (--debug shows where)"
