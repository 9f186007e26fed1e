"""Other packages' autotuned Triton kernels: their configurations are compiled side by side, not one after another."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@functools.cache  # patches once
def compile_side_by_side() -> None:
    """Compile all configurations of a kernel in threads before Triton times them.

    Compiling takes most of the time: minutes for flash-linear-attention. The results are the same.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # no Triton, or an old one
        return
    time_one = Autotuner._bench

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        if config is self.configs[0]:  # the first to be timed for these arguments
            named, options = self.nargs, {name: value for name, value in meta.items() if name != "warmup"}
            with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
                self.warmup(*args, **options)
            self.nargs = named  # which warmup() clears
        return time_one(self, *args, config=config, **meta)

    Autotuner._bench = bench
