"""The exceptions of the package. Each says which argument, what was expected, what came and what to do."""

__all__ = ["Error", "InvalidArgument", "Unsupported"]


class Error(Exception):
    """Base of all errors raised by intarsia."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong: shape, dtype, device, stride or value. Nothing was computed or written."""


class Unsupported(Error, NotImplementedError):
    """The request is well formed, but nothing here can run it; the text says why and what can."""


class CoreNotFound(ImportError):
    """libintarsia.so cannot be used; the text says which, why, and what to do."""
