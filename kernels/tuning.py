"""Other packages' autotuned Triton kernels: tune them in seconds instead of minutes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def limit_configurations(module: Any, *, num_warps: int, most_stages: int) -> None:
    """Let the kernels of a module try only these configurations; a kernel without any of them keeps all."""
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(module).values():
        tuner = getattr(kernel, "fn", None)  # the kernel computes some arguments and calls its tuner
        if isinstance(tuner, Autotuner):
            few = [x for x in tuner.configs if x.num_warps == num_warps and x.num_stages <= most_stages]
            tuner.configs = few or tuner.configs


@functools.cache  # patches once
def tune_in_parallel() -> None:
    """Compile all configurations of a kernel in threads before Triton times them, and time each briefly.

    Otherwise the kernels of flash-linear-attention take minutes: hundreds of configurations, compiled one after another
    and launched about a thousand times each.
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
            self.do_bench = self._do_bench or briefly
        return time_one(self, *args, config=config, **meta)

    Autotuner._bench = bench


def briefly(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Time a configuration for 8 ms, instead of Triton's 100."""
    from triton.testing import do_bench

    return do_bench(call, warmup=2, rep=8, quantiles=quantiles)
