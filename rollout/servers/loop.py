"""An asyncio loop in a background thread, so that requests continue while the main thread trains.

loop = Loop()
future = loop.start(pool.generate(request, sampling))   # a concurrent.futures.Future
sampled = loop.run(pool.generate(request, sampling))    # waits
loop.close()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any


class Loop:
    """Run coroutines in a background thread. start and run may be called from any other thread."""

    def __init__(self, name: str = "rollout") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start the coroutine; cancelling the future cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the loop is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Start the coroutine and wait for it; a timeout or Ctrl-C cancels it."""
        assert threading.current_thread() is not self._thread, "run() inside the loop would deadlock"
        future = self.start(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel running coroutines and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return all results in order; on a failure or cancellation, cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
