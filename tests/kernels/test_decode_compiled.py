"""Decode kernels compiled for a Hopper GPU, which needs no GPU, with the arguments of real launches.

Programmatic dependent launch is safe only if every kernel launched this way waits for the kernel before it.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

from kernels.decode import attention, attention_few, attention_many, block, launch, linear
from tests.kernels.compiled import compile_kernel
from tests.kernels.decode_problems import make_problem
from tests.kernels.test_decode_block import make_heads
from tests.kernels.test_decode_linear import make_layers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SHARED = 227 << 10  # bytes of shared memory per program of an H200
QWEN = (16, 8, 128)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # with the constants
    options: dict[str, Any]

    def compile(self) -> Any:
        types = {name: type_of(x) for name, x in self.arguments.items() if name not in self.constants}
        constants = {name: self.arguments[name] for name in self.constants}
        multiples = [name for name, x in self.arguments.items() if isinstance(x, int) and x % 16 == 0]
        aligned = [name for name in multiples if name in types]
        return compile_kernel(self.kernel, types, constants, aligned=aligned, enable_fp_fusion=True, **self.options)

    @property
    def constants(self) -> list[str]:
        is_constant = {param.name: param.is_constexpr for param in self.kernel.params}
        return [name for name, x in self.arguments.items() if is_constant[name] or x is None]


def type_of(x: Any) -> str:
    """Return Triton's type of an argument."""
    if isinstance(x, torch.Tensor):
        return f"*{TYPES[x.dtype]}"
    if isinstance(x, int | float):
        return "i32" if isinstance(x, int) else "fp32"
    return f"tensordesc<{TYPES[x.base.dtype]}{x.block_shape}>"


class Recorder:
    """Takes the place of a kernel: stores its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named
            arguments |= {"UPCAST": False} if "UPCAST" in named else {}  # as on a GPU
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return run


@pytest.fixture
def record(monkeypatch):
    """Return a function that replaces a kernel by a recorder; launches are those on a Hopper GPU unless told."""

    def replace(module: Any, name: str, *, hopper: bool = True) -> list[Launch]:
        monkeypatch.setattr(launch, "is_supported", lambda x: hopper)
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        return recorder.launches

    return replace


def check(made: Launch, *, waits: bool) -> str:
    """Compile; return the assembly."""
    compiled = made.compile()
    ptx = compiled.asm["ptx"]
    assert made.arguments.get("PDL", False) == made.options.get("launch_pdl", False) == waits
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == waits
    assert compiled.metadata.shared <= SHARED, f"{compiled.metadata.shared} bytes of shared memory"
    return ptx


LINEARS = [  # rows, width, outputs of the layers, ranks of their adapters, gated, grid
    (64, 2048, [1024], None, False, (16, 8, 1)),
    (64, 1024, [3072, 3072], None, True, (96, 1, 1)),
    (7, 1024, [2048, 1024, 1024], [16, 16, 16], False, (64, 2, 1)),
    (128, 1024, [4096, 4096], [64, 64], True, (128, 1, 1)),
]


@pytest.mark.parametrize(("num_rows", "width", "outs", "ranks", "gated", "grid"), LINEARS, ids=str)
def test_linear_uses_tensor_cores(record, num_rows, width, outs, ranks, gated, grid):
    """Most of the 132 multiprocessors have a program. Few rows are padded to 64, because wgmma needs 64."""
    launches = record(linear, "_linear")
    make_layers(num_rows, width, outs, ranks, dtype=torch.bfloat16).run(gated=gated)
    assert launches[0].grid == grid
    ptx = check(launches[0], waits=True)
    used = {name for name in ("wgmma.mma_async", "mma.sync") if f"\t{name}" in ptx}
    assert used == {"wgmma.mma_async"}


FEW = {  # groups of decode rows, whether one program waits for the others
    "8 groups of 8": ([(256, [50] * 8)] * 8, False),
    "3 rows": ([(256, [50, 2000, 1])], True),
}
MANY = {  # groups of decode rows, heads, programs, programs per multiprocessor
    "8 groups of 8": ([(256, [50] * 8)] * 8, (32, 8, 128), (8, 32), 2),
    "130 rows": ([(256, [50] * 10)] * 13, QWEN, (8, 17), 2),
    "512 rows": ([(256, [50] * 8)] * 64, QWEN, (8, 64), 4),
    "small heads": ([(256, [50] * 8)] * 20, (32, 8, 64), (8, 60), 4),
    "large heads": ([(256, [50] * 100)] * 2, (48, 6, 256), (6, 25), 1),
    "16 query heads": ([(256, [50] * 100)] * 2, (128, 8, 128), (16, 25), 1),
}


@pytest.mark.parametrize("name", FEW)
def test_attention_waits_once_per_kind_of_program(record, name):
    groups, waits = FEW[name]
    launches = record(attention_few, "_attend_rows")
    problem = make_problem(groups, heads=QWEN, page=64, dtype=torch.bfloat16)
    attention.decode_attention_kernel(*problem[:4], **problem.options)
    assert launches[0].arguments["WAITS"] == waits
    ptx = check(launches[0], waits=True)
    assert ptx.count("griddepcontrol.wait") == 2 and "atom." in ptx


@pytest.mark.parametrize("name", MANY)
def test_programs_of_many_rows_fit_on_a_multiprocessor(record, name):
    groups, heads, grid, resident = MANY[name]
    launches, plans = record(attention_many, "_attend_tiles"), record(attention_many, "_plan")
    problem = make_problem(groups, heads=heads, page=64, dtype=torch.bfloat16)
    for window in (None, 128) if name == "8 groups of 8" else (None,):
        plan = attention_many.plan_many(problem.keys, problem.rows, num_heads=heads[0], page=64, window=window)
        attention.decode_attention_kernel(*problem[:4], **problem.options, window=window, plan=plan)
    assert launches[0].grid == grid
    for made in launches:
        few = len(problem.query) <= launch.MAX_ROWS
        assert check(made, waits=few).count("griddepcontrol.wait") == few
        assert resident * (made.compile().metadata.shared + 1024) <= SHARED  # CUDA reserves 1024
        assert resident * made.options["num_warps"] <= 8  # of up to 255 registers
    check(plans[0], waits=False)


def test_attention_that_plans_for_itself_does_not_start_early(record):
    """It would read the plan before it is written."""
    launches, _ = record(attention_many, "_attend_tiles"), record(attention_many, "_plan")
    problem = make_problem([(256, [50] * 8)] * 8, heads=(32, 8, 128), page=64, dtype=torch.bfloat16)
    attention.decode_attention_kernel(*problem[:4], **problem.options)
    assert "launch_pdl" not in launches[0].options and not launches[0].arguments["PDL"]


@pytest.mark.parametrize("hopper", [True, False])
def test_block_operations(record, hopper):
    names = ("_add_rms_norm", "_rotate_append", "_silu_mul")
    norm, rotate, silu = (record(block, name, hopper=hopper) for name in names)
    case = make_heads(64, QWEN, dtype=torch.bfloat16)
    parts = case.qkv.float().expand(4, -1, -1).contiguous()
    stream, weight = torch.zeros(64, 1024), torch.zeros(1024)
    block.add_rms_norm_kernel(stream, parts[..., :1024], weight, 1e-6, torch.bfloat16)
    case._replace(qkv=parts).run(block.rotate_append_kernel)
    block.silu_mul_kernel(case.qkv)
    check(norm[0], waits=hopper)
    check(rotate[0], waits=hopper)
    check(silu[0], waits=False)
