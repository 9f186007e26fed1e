"""Other packages' autotuned Triton kernels: tune them in seconds instead of minutes."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WARMUP_MS, MEASURED_MS = 2, 8  # per configuration; Triton's defaults are 25 and 100


@functools.cache  # patches once
def tune_in_parallel() -> None:
    """Compile all configurations of a kernel in threads before Triton times them, and time each briefly.

    Otherwise the kernels of flash-linear-attention take minutes: hundreds of configurations, compiled one after another
    and launched about a thousand times each.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:  # no Triton, or an old one
        return
    time_one = Autotuner._bench
    briefly = functools.partial(do_bench, warmup=WARMUP_MS, rep=MEASURED_MS)

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        if config is self.configs[0]:  # the first to be timed for these arguments
            named, options = self.nargs, {name: value for name, value in meta.items() if name != "warmup"}
            with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
                self.warmup(*args, **options)
            self.nargs = named  # which warmup() clears
            self.do_bench = self._do_bench or briefly
        return time_one(self, *args, config=config, **meta)

    Autotuner._bench = bench
