"""The measurements behind the figures in README.md and docs/: commands, time and targets. `python -m bench` runs them.

`$NAME` in a command is an environment variable: `$STROP_MODEL` is a folder with SmolLM2-135M-Instruct, `$STROP_AGENTS`
an interpreter with openai-agents and mini-swe-agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """Bound of a quantity: rate, seconds, `x PROVIDER` (rate over that provider's), or a key of extra or errors."""

    provider: str
    quantity: str
    least: float | None = None
    most: float | None = None
    shape: Mapping[str, int] = field(default_factory=dict)  # values that the row's shape must contain

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Claim:
    """A command that appends rows, or a part of the GPU tests."""

    name: str  # group/name
    shows: str
    command: str  # module and arguments
    seconds: int  # on one H200, for the whole process
    smoke: str = ""  # the same on a CPU in small; empty: cannot run there
    needs: tuple[str, ...] = ("cuda",)  # cuda, or packages
    targets: tuple[Target, ...] = ()
    compares: bool = False  # with the checkout given as --old
    env: Mapping[str, str] = field(default_factory=dict)


def at_least(provider: str, quantity: str, value: float, **shape: int) -> Target:
    return Target(provider, quantity, least=value, shape=shape)


def at_most(provider: str, quantity: str, value: float, **shape: int) -> Target:
    return Target(provider, quantity, most=value, shape=shape)


def sampling(name: str, shape: str, cases: str, seconds: int, *targets: Target, more: str = "") -> Claim:
    command = f"bench.rollout --engine local --shape {shape} --cases {cases}{more}"
    smoke = "bench.rollout --engine local --shape tiny --cases 2x2x5x7 --rounds 1"
    return Claim(
        f"sampling/{name}", f"completion tokens/s, {shape}", command, seconds, smoke, targets=targets, compares=True
    )


def tests(name: str, files: str, seconds: int, more: str = "") -> Claim:
    words = " ".join(f"tests/{file}" for file in files.split())
    needs = ("cuda", "pytest", *(["xdist"] if "-n " in more else []))
    marks = "-m 'gpu and not slow and not vllm'"
    smoke = f"pytest -q --collect-only -m gpu {words}"
    return Claim(f"tests/{name}", "GPU tests", f"pytest -q {marks} {more} {words}", seconds, smoke, needs)


PEERS = ("cuda", "trl", "liger_kernel", "datasets")
WITH_VLLM = (*PEERS, "vllm")
LINEAR = ("cuda", "fla")
COMPILED = "ours, bf16, compile, by memory"
SAMPLED = f"{COMPILED}, local"
AGENTS = "bench.runs.agents --model $STROP_MODEL --python $STROP_AGENTS --agents {}"
FEW = " --sft-steps 1 --steps 1 --prompts 1 --group 2 --eval-rows 1"
SMALL_STEP = "bench.vs_trl {} --shape tiny --ways 'ours, by memory' --steps 16 --profiled 3"
SMALL_GRPO = (
    "bench.vs_trl grpo --shape {} --ways 'ours, local' --prompts 2 --group 2 --completion 4 --steps 4 --profiled 3"
)
CLAIMS = (
    # Kernels, one process each; make bench.
    Claim("kernels/linear_logprob", "log-prob head vs. its peers", "bench.linear_logprob", 240,
          "bench.linear_logprob --only forward --seconds 0", ()),
    Claim("kernels/linear_kl", "distillation head", "bench.linear_kl", 180, "bench.linear_kl --seconds 0", ()),
    Claim("kernels/attention", "attention over packed rows", "bench.attention", 90, "bench.attention --seconds 0", ()),
    Claim("kernels/decode", "attention, linear layers and draw of a decode step", "bench.decode_attention", 85,
          "bench.decode_attention --seconds 0", ()),
    Claim("kernels/block", "norms, rotation, activation", "bench.block", 50, "bench.block --seconds 0", ()),
    Claim("kernels/adamw", "stochastic rounding", "bench.adamw", 40, "bench.adamw --seconds 0", ()),
    Claim("kernels/nf4", "frozen layers in 4 bits, in FP8 and with an adapter", "bench.nf4", 60,
          "bench.nf4 --shape qwen3-0.6b --tokens 16 --seconds 0", ()),
    Claim("kernels/train_step", "shared prompts in a GRPO step", "bench.train_step", 90,
          "bench.train_step --seconds 0", ()),
    Claim("kernels/ebft", "strided energy-based fine-tuning", "bench.ebft", 150,
          "bench.ebft --tokens 40 --seconds 0", ()),
    # Agents.
    Claim("agents/trees", "episodes of 8 turns as trees vs. separate rows: computed tokens and step time",
          "bench.train_step --turns 8 --prompt 512 --completion 128", 150,
          "bench.train_step --turns 3 --group 2 --prompt 16 --completion 8 --seconds 0"),
    Claim("agents/openai", "openai-agents learns the task: success before and after",
          AGENTS.format("openai"), 240, AGENTS.format("openai") + FEW, targets=(at_least("openai", "gain", 0.1),)),
    Claim("agents/mini", "mini-swe-agent learns the task: success before and after",
          AGENTS.format("mini"), 300, AGENTS.format("mini") + FEW, targets=(at_least("mini", "gain", 0.1),)),
    # Models with linear attention.
    Claim("hybrids/gradients", "packed rows and shared prompts have the gradient of separate rows",
          "bench.runs.hybrid_gradients", 300, "bench.runs.hybrid_gradients --seconds 0", LINEAR,
          (at_most("packed", "to_separate", 1e-3), at_most("shared prompt", "to_separate", 1e-3)),
          env={"TRITON_F32_DEFAULT": "tf32x3"}),
    Claim("hybrids/sft", "SFT of a Qwen3.5-like 1B: packed, one per row, TRL",
          "bench.vs_trl sft --shape qwen3.5-1b --profiled 4 --ways TRL 'TRL, liger' 'TRL, liger, no checkpointing' "
          f"'ours, bf16, by memory' 'ours, bf16, by memory, rows' '{COMPILED}'", 420,
          SMALL_STEP.format("sft").replace("tiny", "tiny-qwen3.5"), (*PEERS, "fla")),
    Claim("hybrids/grpo", "GRPO of a Qwen3.5-like 1B: packed, one per row, TRL",
          "bench.vs_trl grpo --shape qwen3.5-1b --no-trl-vllm --completion 256 --steps 4 --profiled 3 --ways TRL "
          "'ours, bf16, by memory, local' 'ours, bf16, by memory, rows, local'", 240,
          SMALL_GRPO.format("tiny-qwen3.5"), (*PEERS, "fla")),
    Claim("hybrids/vllm", "sampling of an LFM2-like 1.2B vs. vLLM",
          "bench.rollout --engine both --shape lfm2-1.2b --cases 8x8x256x256 64x8x256x256 --rounds 2", 200,
          "bench.rollout --engine local --shape tiny-qwen3.5 --cases 2x2x5x7 --rounds 1", ("cuda", "vllm")),
    # Whole steps.
    Claim("steps/dpo", "DPO of a 1.7B: best TRL, compiled and not, GPU busy",
          "bench.vs_trl dpo --profiled 4 --ways TRL 'TRL, liger' 'TRL, liger, no checkpointing' "
          f"'TRL, liger, compile, no checkpointing' '{COMPILED}' 'ours, bf16, by memory'", 320,
          SMALL_STEP.format("dpo"), PEERS,
          (at_least(COMPILED, "x best TRL", 2.6), at_least("ours, bf16, by memory", "x best TRL", 2.0),
           at_least(COMPILED, "gpu_busy", 0.95), at_least("ours, bf16, by memory", "gpu_busy", 0.75),
           at_most(COMPILED, "first_loss", 1e-4))),
    Claim("steps/grpo", "GRPO of a 0.6B, 64 x 8 x 256: best TRL",
          "bench.vs_trl grpo --prompts 64 --completion 256 --trl-accumulation 8 --steps 5 --profiled 3 --ways "
          f"'TRL, liger' '{SAMPLED}'", 240, SMALL_GRPO.format("tiny"), WITH_VLLM,
          (at_least(SAMPLED, "x best TRL", 4.5), at_least(SAMPLED, "train_busy", 0.9))),
    Claim("steps/grpo-exact", "GRPO of a 0.6B with and without --exact-sampling, not compiled",
          "bench.vs_trl grpo --prompts 64 --completion 256 --steps 5 --profiled 3 --ways 'ours, bf16, local' "
          "'ours, bf16, exact, local'", 180, SMALL_GRPO.format("tiny").replace("local", "exact, local"), PEERS),
    Claim("steps/grpo-1b", "GRPO of a Llama-3.2-1B, 16 x 8 x 384: best TRL",
          "bench.vs_trl grpo --shape llama-3.2-1b --prompts 16 --completion 384 --steps 6 --profiled 3 --ways "
          f"'TRL, liger' '{SAMPLED}'", 190, SMALL_GRPO.format("tiny"), WITH_VLLM,
          (at_least(SAMPLED, "x best TRL", 3.5),)),
    Claim("steps/dpo-8b", "DPO of an 8B, LoRA 16: best TRL, bfloat16 and FP8 base",
          "bench.vs_trl dpo --shape llama-3.1-8b --lora 16 --steps 18 --profiled 3 --ways 'TRL, liger' "
          "'TRL, liger, compile' 'ours, compile, by memory' 'ours, fp8, compile, by memory'", 390,
          SMALL_STEP.format("dpo") + " --lora 4", PEERS, (at_most("ours, compile, by memory", "first_loss", 1e-4),)),
    Claim("steps/sft-8b", "SFT of an 8B, LoRA 16: best TRL, bfloat16 and FP8 base",
          "bench.vs_trl sft --shape llama-3.1-8b --lora 16 --steps 18 --profiled 3 --ways 'TRL, liger' "
          "'TRL, liger, compile' 'ours, compile, by memory' 'ours, fp8, compile, by memory'", 360,
          SMALL_STEP.format("sft") + " --lora 4", PEERS),
    Claim("steps/sft", "SFT of a 1.7B: best TRL",
          "bench.vs_trl sft --profiled 4 --ways TRL 'TRL, liger' 'TRL, liger, compile, no checkpointing' "
          f"'{COMPILED}'", 260, SMALL_STEP.format("sft"), PEERS),
    Claim("steps/sft-16k", "SFT of a 1.7B on rows of 16,384 tokens: best TRL",
          f"bench.vs_trl sft --length 16384 --rows 2 --steps 18 --profiled 3 --ways 'TRL, liger' '{COMPILED}'", 200,
          SMALL_STEP.format("sft") + " --length 300 --rows 2", PEERS),
    Claim("steps/experts", "SFT of a 5B with experts: best TRL",
          f"bench.vs_trl sft --shape qwen3-moe-5b --steps 18 --profiled 3 --ways 'TRL, liger' '{COMPILED}'", 300,
          SMALL_STEP.format("sft").replace("tiny", "tiny-qwen3-moe"), PEERS),
    Claim("steps/startup", "seconds to the end of the first step of SmolLM2",
          "bench.runs.startup --model $STROP_MODEL", 70, "bench.runs.startup --model builtin:tiny",
          targets=(at_most("cached", "seconds", 10),)),
    Claim("steps/rows", "chat rows read per second, on 1 and 8 cores",
          "bench.rows --model $STROP_MODEL --num-rows 5000 200000 --cores 1 8", 160,
          "bench.rows --model $STROP_MODEL --num-rows 40 60 --cores 1 2", ("datasets",),
          (at_least("read", "rate", 2080, cores=8),)),
    # Sampling.
    sampling("0.6b", "qwen3-0.6b", "8x8x256x512 64x8x256x256 256x8x256x1024", 100,
             at_least("local", "rate", 50e3, R=512), at_least("local", "rate", 130e3, R=256),
             at_least("local", "rate", 80e3, R=1024), more=" --lengths full full lognormal"),
    Claim("sampling/lora", "cost of an adapter of rank 16 at 64 and 512 rows, 0.6B",
          "bench.rollout --engine local --lora 16 --cases 8x8x256x512 64x8x256x256", 100,
          "bench.rollout --engine local --shape tiny --lora 4 --cases 2x2x5x7 --rounds 1",
          targets=(at_least("local, LoRA 16", "x local", 1 / 1.2, prompts=8),
                   at_least("local, LoRA 16", "x local", 1 / 1.1, prompts=64))),
    Claim("sampling/partial", "completions/s of partial rollouts, log-normal lengths, 0.6B",
          "bench.rollout --engine local --cases 64x8x256x1024 --lengths lognormal --partial 0.5 --rounds 6", 110,
          "bench.rollout --engine local --shape tiny --cases 4x2x5x64 --lengths lognormal --partial 0.5 --rounds 2"),
    sampling("1.7b", "qwen3-1.7b", "8x8x256x256 32x8x256x256", 60,
             at_least("local", "rate", 40e3, prompts=8), at_least("local", "rate", 80e3, prompts=32)),
    sampling("8b", "llama-3.1-8b", "32x8x256x256", 70, at_least("local", "rate", 29e3)),
    sampling("1b-2048", "llama-3.2-1b", "16x8x512x2048", 70, at_least("local", "rate", 56.2e3)),
    sampling("1b-16k", "llama-3.2-1b", "2x8x256x16384", 130, more=" --rounds 1"),
    # Tests, the code that changed last first.
    tests("policy", "trainer/policy/test_attention.py trainer/policy/test_fuse.py "
          "trainer/policy/test_compile_choice.py trainer/policy/test_offload.py trainer/test_plan.py "
          "trainer/policy/test_four_bit.py", 150),
    tests("engine", "rollout/engines rollout/test_sets.py trainer/rl/test_engine_choice.py", 240),
    tests("runs", "test_gpu_runs.py", 420),
    tests("syncs", "test_gpu_syncs.py trainer/run trainer/policy/test_bad_steps.py trainer/policy/test_optim.py", 240),
    tests("kernels", "kernels", 240, "-n 6"),
    tests("ranks", "test_nccl.py test_ranks.py test_context.py rollout/sync", 440, "-n 5"),
)  # fmt: skip
