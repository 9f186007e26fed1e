"""Configurations of autotuned kernels are compiled before they are timed, and timed briefly."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.tuning import limit_configurations, tune_in_parallel


def test_configurations_are_compiled_in_parallel_and_timed_briefly(monkeypatch):
    pytest.importorskip("triton")
    from triton import Config
    from triton.runtime import _async_compile
    from triton.runtime.autotuner import Autotuner

    tune_in_parallel()
    together, compiled, timed = threading.Barrier(3, timeout=20), [], []

    class Kernel:
        """Stands in for a jitted function, whose warmup() only submits its compilation in this mode."""

        @staticmethod
        def fn(x: int) -> None: ...

        def warmup(self, *args: Any, SIZE: int, **options: Any) -> None:
            compiled.append(_async_compile.active_mode.get().executor.submit(together.wait))

        def run(self, *args: Any, SIZE: int, **options: Any) -> None:
            timed.append(SIZE)

    def do_bench(call: Any, warmup: float, rep: float, quantiles: Any) -> list[float]:
        assert warmup + rep <= 10  # ms
        call()
        return [float(timed[-1])] * 3

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    configs = [Config({"SIZE": size}) for size in (3, 2, 1)]
    tuner = Autotuner(Kernel(), ["x"], configs, ["x"], None, None)
    for _ in range(2):
        tuner.run(5, grid=(1,), warmup=False)
    assert len(compiled) == 3 and all(not x.exception() for x in compiled)  # no broken barrier: at the same time
    assert timed == [3, 2, 1, 1, 1]  # each is timed once, the fastest runs
    assert _async_compile.active_mode.get() is None


def test_a_kernel_keeps_all_configurations_if_none_is_wanted():
    pytest.importorskip("triton")
    from triton import Config, autotune, heuristics, jit

    def kernel_of(*sizes: tuple[int, int]) -> Any:
        def kernel(x, SIZE): ...

        configs = [Config({}, num_warps=warps, num_stages=stages) for warps, stages in sizes]
        return heuristics({"SIZE": lambda arguments: 1})(autotune(configs=configs, key=[])(jit(kernel)))

    module = SimpleNamespace(some=kernel_of((2, 2), (4, 2), (4, 3), (4, 4)), none=kernel_of((2, 2), (8, 2)), other=int)
    limit_configurations(module, num_warps=4, most_stages=3)
    assert [config.num_stages for config in module.some.fn.configs] == [2, 3]
    assert [config.num_warps for config in module.none.fn.configs] == [2, 8]
