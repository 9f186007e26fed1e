"""UserError: an error that the user can fix, shown as one sentence instead of a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """`name=value: what is wrong; what to do`. Any other exception is a bug and keeps its traceback."""
