"""Compile Triton kernels for a Hopper GPU, which needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, aligned: Iterable[str] = (), **options: Any
) -> Any:
    """Compile for compute capability 9.0. Pointers, and the numbers in `aligned`, are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    multiples = [name for name in names if signature[name].startswith("*") or name in aligned]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
