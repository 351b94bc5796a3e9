"""The errors of attnspan: one line that names the argument, what was found and what was expected."""


class Error(Exception):
    """Any error of attnspan. `argument` is the name of the argument, or the file, that is at fault."""

    argument: str = ""


class InvalidArgument(Error, ValueError):
    """An argument contradicts the contract."""


class Unsupported(Error, NotImplementedError):
    """The contract allows it, the chosen backend does not; the message says why."""


class Unavailable(Error, RuntimeError):
    """The backend or device is not on this machine."""


class FileError(Error, OSError):
    """A file is missing, torn, foreign or cannot be written."""


class OutOfMemory(Error, MemoryError):
    """The device has not enough memory for the call."""


def missing(module: str, error: ImportError, requirement: str) -> ImportError:
    """What `import module` raises where a package that it is about is not there, or too old."""
    return type(error)(
        f"{module} needs {requirement} ({error}): pip install '{requirement}'",
        name=error.name,
        path=error.path,
    )
