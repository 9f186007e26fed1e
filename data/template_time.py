"""Chat templates are programs that come with models: they get a time limit.

    text = apply_template(tokenizer, messages, add_generation_prompt=True)   # Endless, a ValueError, after SECONDS

Jinja's sandbox bounds one range() but not loops within loops. A signal would reach the main thread only, and tools are
rendered in others; a process for each rendering would cost more than the rendering. So one thread watches all
renderings of this process and raises an exception in the thread of one that is late, which Python delivers between two
operations of the template. A single operation that never ends (9**9**9**9) cannot be interrupted that way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

SECONDS = 10.0  # a long conversation takes milliseconds
LOOK_SECONDS = 0.25
T = TypeVar("T")

_running: dict[object, tuple[float, int]] = {}  # deadline and thread of what is being rendered
_watchdog: threading.Thread | None = None
_names: dict[str, str] = {}  # template -> how the user named it


class Overdue(BaseException):
    """Raised inside a template that takes too long; not an Exception, so that nothing in between handles it."""


class Endless(ValueError):
    """The sentence about such a template."""


def name_template(template: str, name: str) -> None:
    """Say how sentences about this template shall call it."""
    _names[template] = name


def apply_template(tokenizer: Any, messages: Any, **settings: Any) -> str:
    """tokenizer.apply_chat_template as text, or Endless with the name of the template."""
    try:
        return within(SECONDS, lambda: tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except TimeoutError:
        own = f"tokenizer_default (of {tokenizer.name_or_path})"
        name = _names.get(str(tokenizer.chat_template), own)
        raise Endless(f"chat_template={name}: did not end within {SECONDS:g} s; use another template") from None


def within(seconds: float, call: Callable[[], T]) -> T:
    """call(), or TimeoutError after so many seconds, in any thread."""
    _watch()
    key, arrived = object(), False
    try:
        _running[key] = (time.monotonic() + seconds, threading.get_ident())
        try:
            return call()
        except Overdue:
            arrived = True
            raise
        finally:
            # Whoever takes the entry out decides: we are done in time, or the exception is on its way to us.
            if _running.pop(key, None) is None:
                while not arrived:
                    time.sleep(0.01)
    except Overdue:
        raise TimeoutError(f"did not end within {seconds:g} s") from None


def _watch() -> None:
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # none yet, or left behind by a fork
        _watchdog = threading.Thread(target=_look, name="template-time", daemon=True)
        _watchdog.start()


def _look() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        for key, (deadline, thread) in list(_running.items()):
            if now > deadline and _running.pop(key, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overdue))
