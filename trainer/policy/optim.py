"""Optimizers (AdamW, 8-bit AdamW, Muon), the schedule, and the one place that turns losses into an update.

    optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
    total_loss(out, denominators).backward()                                   # per micro-batch
    begun = launch_step(policy.model, optimizer, schedule, max_grad_norm, where, sums, bad_steps)
    grad_norm = begun.settle()

A step whose loss or gradient is not finite stops the run with an error that names it, or is skipped (--nan-policy). A
skipped step changes neither weights nor moments; the schedule advances, and its metrics are logged. Where the optimizer
allows it, the device itself clips and calls off the step: the host launches it first, and reads norm and loss when it
calls settle().

With --trained-dtype bfloat16 weights and moments are bfloat16 (kernels/adamw.py); with --optim adamw_8bit moments are
8 bit (torchao). Checkpoints hold 8-bit moments as float32, so that any number of ranks can read them, and, if they are
not sharded, the scales of their blocks, which restore the same codes. --optim muon is two optimizers in one.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from data.errors import UserError
from kernels.adamw import ParamTensors, Rates, StepGuard, Update, step_all_
from losses.types import LossOut
from trainer.config.blocks import OptimConfig
from trainer.metrics.metrics import Counters, MetricSums
from trainer.parallel.comm import all_sum, context_size, is_main, tensors_from_main
from trainer.parallel.dtensor import is_dtensor, local
from trainer.policy.sharding import gradient_norm, scale_gradients, sum_gradients

SCALE = "_scale"
NO_WARMUP = 10_000  # steps after which inverse_sqrt has fallen to sqrt(1/2), without a warm-up


# optimizer and schedule ------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, cfg: OptimConfig, total_steps: int) -> tuple[Optimizer, LambdaLR]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if cfg.optim == "muon":
        optimizer = muon_and_adamw(model, groups, cfg)
    elif cfg.optim == "adamw_8bit" or any(p.dtype == torch.bfloat16 for p in trained):
        optimizer = small_adamw(groups, cfg)
    else:
        # One kernel for all weights on a GPU: the unfused step allocates a temporary as large as all of them.
        fused = all(p.device.type == "cuda" for p in trained)
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        optimizer = AdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, fused=fused)
    return optimizer, LambdaLR(optimizer, lr_factor(cfg, total_steps))


def lr_factor(cfg: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Multiplier of the peak rate after `step` updates: a linear warm-up, then the decay of --lr-scheduler-type."""
    kind, least, warmup = cfg.lr_scheduler_type, cfg.min_lr_ratio, cfg.num_warmup(total_steps)
    first = warmup  # step of the peak, from which the rate falls
    if kind == "warmup_stable_decay":
        first = max(warmup, total_steps - round(cfg.decay_ratio * total_steps))
    timescale = warmup or NO_WARMUP

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant" or step < first:
            return 1.0
        if kind == "inverse_sqrt":
            return math.sqrt(timescale / (step - warmup + timescale))
        done = (step - first) / max(1, total_steps - first)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return max(0.0, 1.0 - done) if kind == "linear" else least + (1.0 - least) * cosine

    return factor


def advance(schedule: LambdaLR) -> None:
    """Count a step, also one that was skipped."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # the first step skipped
        schedule.step()


def restore_schedule(schedule: LambdaLR, *, last_epoch: int, step_count: int) -> None:
    """Count from where it was; the rate follows from the count, as LambdaLR itself computes it."""
    schedule.last_epoch, schedule._step_count = last_epoch, step_count
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rate = base * factor(last_epoch)
        if isinstance(group["lr"], Tensor):  # torchao's optimizers hold on to it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = [float(group["lr"]) for group in groups]


# from losses to an update ----------------------------------------------------------------------------------------


def total_loss(out: LossOut, denominators: dict[str, Tensor]) -> Tensor:
    """Each term divided once, by its count over the whole optimizer step and all ranks."""
    assert out.terms.keys() <= denominators.keys(), f"terms {sorted(out.terms)} vs {sorted(denominators)}"
    parts = [term.weight * term.sum / denominators[name].clamp(min=1) for name, term in out.terms.items()]
    return torch.stack(parts).sum()


def term_metrics(out: LossOut) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of the terms themselves: loss/<name> per counted unit, unweighted."""
    return {f"loss/{name}": (term.sum.detach(), term.count) for name, term in out.terms.items()}


def launch_step(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    max_grad_norm: float,
    where: str,
    sums: MetricSums | None = None,
    bad_steps: BadSteps | None = None,
) -> PendingStep:
    """Sum gradients over ranks, clip, check, step. A step that is not finite is never applied (`bad_steps`).

    `sums` are the metrics of the step, whose loss is checked too. With an optimizer that takes a gate, the device
    checks and steps, and the host learns of it when it calls settle(), which it must before the next step begins.
    Other optimizers wait here.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    limit = max_grad_norm if max_grad_norm > 0 else math.inf
    sum_gradients(model)
    checked = values_to_check(trained, sums)
    read = copy_to_host(checked)
    is_gated, known = takes_gate(optimizer), set(optimizer.state)
    stepped = [p for p in trained if p.grad is not None]
    bad_steps = bad_steps or BadSteps()

    def wait() -> None:
        grad_norm, *loss = read()
        begun.grad_norm = grad_norm
        if problem := not_finite(grad_norm, *loss):
            if is_gated:
                undo_step(optimizer, known, stepped)
            bad_steps.skip(problem, where)
        else:
            if not is_gated:
                scale_gradients(trained, grad_norm, limit)
                optimizer.step()
            bad_steps.end()
        begun.skipped = bad_steps.counters.skipped()

    begun = PendingStep(wait)
    if is_gated:
        gated_step(optimizer, checked, limit)
    else:
        begun.wait()
    optimizer.zero_grad(set_to_none=True)
    advance(schedule)
    return begun


class PendingStep:
    """An optimizer step that the host may know the outcome of later."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self.grad_norm = math.nan
        self.skipped: dict[str, float] = {}  # the metric: steps skipped so far, this one included

    def wait(self) -> float:
        """Wait for the gradient norm; the first call skips the step, or stops the run, if it is not finite."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
        return self.grad_norm


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start a copy to the host; the call waits for it, but not for work that was launched in between."""
    if not values.is_cuda:
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return wait


# a step that the device clips, or calls off ----------------------------------------------------------------------


def takes_gate(optimizer: Optimizer) -> bool:
    """Whether its step divides gradients by `grad_scale`, and changes nothing where `found_inf` is 1."""
    if isinstance(optimizer, RoundedAdamW):
        return True
    if not isinstance(optimizer, AdamW) or not all(group["fused"] for group in optimizer.param_groups):
        return False
    return not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])


def gated_step(
    optimizer: Any,
    checked: Tensor,  # (N,) gradient norm, and what else must be finite
    limit: float,
) -> None:
    """A step with gradients clipped to the norm `limit`, which changes nothing if a number is not finite."""
    optimizer.grad_scale = ((checked[0] + 1e-6) / limit).clamp(min=1.0).float()
    optimizer.found_inf = 1.0 - checked.isfinite().all().float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def undo_step(
    optimizer: Optimizer,
    known: set[Tensor],  # parameters that had moments before, each (...)
    stepped: list[nn.Parameter],  # those that had a gradient
) -> None:
    """The device has called off the last step, so that weights and moments are as before: let the rest be so too."""
    if isinstance(optimizer, RoundedAdamW):  # torch's counts on the device
        optimizer.undo_step(stepped)
    for parameter in optimizer.state.keys() - known:
        del optimizer.state[parameter]


# steps that are not finite ---------------------------------------------------------------------------------------


def values_to_check(trained: list[nn.Parameter], sums: MetricSums | None) -> Tensor:  # (1,) or (2,) float64
    """Gradient norm, and the loss of the step if it is known; both global, so the same on every rank.

    A loss may be infinite with a finite gradient (a target of probability 0 in float32).
    """
    values = [gradient_norm(trained)]
    if sums is not None and "loss/total" in sums.pairs:
        values.append(all_sum(sums.pairs["loss/total"][0], "loss", everyone=True))
    return torch.stack([value.to(values[0].device, torch.float64) for value in values])


def not_finite(grad_norm: float, loss: float = 0.0) -> str | None:
    """What of this step is not finite, or None."""
    if not math.isfinite(grad_norm):
        return f"gradient norm {grad_norm}"
    return None if math.isfinite(loss) else f"loss {loss}"


class BadSteps:
    """Skips or stops; the counts are in the checkpoint, so a resumed run stops where an uninterrupted one would."""

    def __init__(
        self,
        cfg: OptimConfig | None = None,
        counters: Counters | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cfg, self.counters, self.note = cfg or OptimConfig(), counters or Counters(), note

    def skip(self, problem: str, where: str) -> None:
        """Count and log a skipped step; ValueError if the run must stop instead."""
        counters, limit = self.counters, self.cfg.nan_skip_limit
        if self.cfg.nan_policy == "stop" or counters.skipped_in_a_row >= limit:
            before = f", after {limit} skipped steps in a row" if self.cfg.nan_policy == "skip" else ""
            raise UserError(f"{where}: {problem} is not finite{before}; lower --learning-rate or mend these rows")
        counters.skipped_steps += 1
        counters.skipped_in_a_row += 1
        self.note(f"skipped {where}: {problem} is not finite ({counters.skipped_in_a_row} in a row, at most {limit})")

    def end(self) -> None:
        """A step was finite."""
        self.counters.skipped_in_a_row = 0


# Muon for matrices -----------------------------------------------------------------------------------------------


def muon_and_adamw(model: nn.Module, groups: list[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    """torch's Muon for the matrices of the blocks, AdamW for embeddings, heads, norms, biases and stacked experts."""
    trained = [p for group in groups for p in group["params"]]
    if hasattr(model, "peft_config"):
        raise UserError("optim=muon: is for full matrices, not for the factors of LoRA; use adamw, or --lora.r 0")
    if any(is_dtensor(p) for p in trained):
        raise UserError("optim=muon: does not work on shards; use --parallel.mode replicate, or --optim adamw")
    if any(p.dtype == torch.bfloat16 for p in trained):
        raise UserError("optim=muon: needs float32 weights; leave --trained-dtype bfloat16 out, or use --optim adamw")
    ends = [child for child in model.children() if isinstance(child, nn.Linear)]  # heads
    ends += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(p) for module in ends for p in module.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in apart]
    chosen = {id(p) for p in matrices}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    return MuonAndAdamW(matrices, [group for group in others if group["params"]], cfg)


class MuonAndAdamW(Optimizer):
    """Both as one optimizer, with shared parameter groups and state: for the schedule, and for checkpoints."""

    def __init__(self, matrices: list[nn.Parameter], others: list[dict[str, Any]], cfg: OptimConfig) -> None:
        rate, betas = cfg.learning_rate, (cfg.adam_beta1, cfg.adam_beta2)
        fused = all(p.device.type == "cuda" for group in others for p in group["params"])
        self.parts: list[Optimizer] = []
        if matrices:
            options = {"weight_decay": cfg.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            self.parts.append(torch.optim.Muon(matrices, lr=rate, **options))
        if others:
            self.parts.append(AdamW(others, lr=rate, betas=betas, eps=cfg.adam_epsilon, fused=fused))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": rate, "fused": fused})
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()


# weights in bfloat16, moments in 8 bit ---------------------------------------------------------------------------


def small_adamw(groups: list[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    if cfg.optim == "adamw":
        return RoundedAdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon)
    check_installed(cfg)
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, bf16_stochastic_round=True)


def check_installed(cfg: OptimConfig) -> None:
    """Whether the optimizer's package is there; open_run asks before a model is loaded."""
    if cfg.optim == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"optim={cfg.optim}: 8-bit moments need torchao, which is not installed; pip install -e '.[small]', or use "
            "--optim adamw"
        )


class RoundedAdamW(Optimizer):
    """Weights and moments in bfloat16, with stochastic rounding; float32 parameters are not rounded."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes `grad_scale` and `found_inf` as torch's fused AdamW does, if they are set (kernels.adamw.Gate)."""
        updates, number = [], 0  # of the parameter, which seeds its random bits
        for group in self.param_groups:
            fixed = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            rates: dict[int, Rates] = {}  # by the number of the step
            for parameter in group["params"]:
                number += 1
                if (grad := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                t = count_step(state["step"], 1)
                if t not in rates:
                    rates[t] = Rates(*fixed, t)
                held = ParamTensors(parameter, grad, state["exp_avg"], state["exp_avg_sq"])
                if is_dtensor(parameter):
                    held = ParamTensors(*map(local, held))
                updates.append(Update(held, rates[t], (t << 16 ^ number) % 2**31))
        is_gated = hasattr(self, "grad_scale")
        step_all_(updates, StepGuard(self.grad_scale, self.found_inf) if is_gated else None)

    def undo_step(self, stepped: list[nn.Parameter]) -> None:
        """Count the last step, in which these had a gradient, no more."""
        for parameter in stepped:
            count_step(self.state[parameter]["step"], -1)


def count_step(
    count: Tensor,  # () float32, on the CPU
    change: int,
) -> int:
    """Change the count and return it. It runs for every parameter, and numpy is faster than torch for one number."""
    number = count.numpy()
    number += change
    return int(number)


def as_saved(slots: dict[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state of one parameter as plain tensors, for a checkpoint."""
    saved: dict[str, Tensor] = {}
    for key, slot in slots.items():
        own = local(slot)
        if not _is_small(own):
            saved[key] = slot
        elif is_dtensor(slot):
            saved[key] = _in_shards(own.dequantize(), slot)
        else:
            saved |= {key: own.dequantize(), key + SCALE: own.scale}
    return saved


@torch.no_grad()
def as_held(optimizer: Optimizer, parameter: nn.Parameter, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of as_saved: the state as this optimizer holds it, on the parameter's device and sharded like it."""
    held = {}
    for key, value in saved.items():
        if key.endswith(SCALE):
            continue
        if key == "step":  # AdamW counts steps on the CPU unless it is fused
            held[key] = value.to(parameter.device) if optimizer.defaults.get("fused") else value
            continue
        if not hasattr(optimizer, "_new_buffer"):  # only torchao's optimizers have it
            held[key] = value.to(parameter.device, parameter.dtype)
            continue
        held[key] = optimizer._new_buffer(parameter, key == "exp_avg")
        own, scale = local(held[key]), saved.get(key + SCALE)
        if _is_small(own) and scale is not None and scale.shape == own.scale.shape:
            from torchao.optim.quant_utils import quantize_8bit_with_qmap

            blocks = local(value).to(own.device).view(len(scale), -1) / scale.to(own.device).unsqueeze(1)
            own.codes.copy_(quantize_8bit_with_qmap(blocks, own.qmap).view(own.shape))
            own.scale.copy_(scale)
        else:
            own.copy_(local(value))
    return held


def _is_small(tensor: Tensor) -> bool:
    return hasattr(tensor, "codes")


def _in_shards(own: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# modules trained beside the policy -------------------------------------------------------------------------------


class TrainedModule:
    """A module trained beside the policy (a critic, a value head): its own optimizer, and its part of a checkpoint.

    Every rank holds a replica, all starting with rank 0's weights; gradients are summed over ranks. Parameters, buffers
    and optimizer state are in the checkpoint, so a resumed run continues with the same numbers.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        cfg: OptimConfig,
        total_steps: int,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name, self.module, self.cfg = name, module, cfg
        weights = list(module.state_dict().values())
        for own, first in zip(weights, tensors_from_main(weights if is_main() else None, name), strict=True):
            own.copy_(first)
        self.optimizer, self.schedule = build_optimizer(module, cfg, total_steps)
        self.counters = Counters()  # of its own steps that were not finite
        self.bad_steps = BadSteps(cfg, self.counters, note)

    def step(self, where: str, *, skip: bool = False) -> None:
        """`skip`: the policy's step was skipped, so this one is too; the schedule counts it."""
        for parameter in self.module.parameters():
            if skip:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad /= context_size()  # ranks that share rows have all computed the same gradient
        if skip:
            advance(self.schedule)
            return
        where = f"{where}, {self.name}"
        limit = self.cfg.max_grad_norm
        launch_step(self.module, self.optimizer, self.schedule, limit, where, bad_steps=self.bad_steps).wait()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.schedule.last_epoch, "counters": self.counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_schedule(self.schedule, last_epoch=state["updates"], step_count=state["updates"] + 1)
        self.counters.load_state_dict(state["counters"])

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, and `NAME/exp_avg` and so on of the optimizer state of a parameter."""
        found = self.module.state_dict()
        for name, parameter in self.module.named_parameters():
            slots = as_saved(self.optimizer.state.get(parameter, {}))
            found |= {f"{name}/{key}": value for key, value in slots.items()}
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(tensors[name])
        for name, parameter in self.module.named_parameters():
            saved = {key.removeprefix(f"{name}/"): tensors[key] for key in tensors if key.startswith(f"{name}/")}
            if saved:
                self.optimizer.state[parameter] = as_held(self.optimizer, parameter, saved)
