"""Optimizers (AdamW, 8-bit AdamW, Muon), the learning rate schedule, and the optimizer step.

    optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
    total_loss(out, denominators).backward()                                   # per micro-batch
    pending = launch_step(policy.model, optimizer, schedule, max_grad_norm, where, metrics, bad_steps)
    grad_norm = pending.wait()

A step with a non-finite loss or gradient stops the run with an error that names the step, or is skipped (--nan-policy).
A skipped step changes neither weights nor moments; the schedule advances and the metrics are logged. If the optimizer
supports it, the device clips the gradients and skips the step: the host launches the step first, and reads norm and
loss in wait().

With --trained-dtype bfloat16, weights and moments are bfloat16 (kernels/adamw.py). With --optim adamw_8bit, moments are
8-bit (torchao). Checkpoints store 8-bit moments as float32, so that any number of ranks can read them; unless they are
sharded, checkpoints also store the block scales, which restore the same codes. --optim muon combines two optimizers.
"""

from __future__ import annotations

import importlib.util
import math
import re
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
NO_WARMUP = 10_000  # steps until inverse_sqrt falls to sqrt(1/2) without a warm-up


# optimizer and schedule ------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, cfg: OptimConfig, total_steps: int) -> tuple[Optimizer, LambdaLR]:
    trained = [p for p in model.parameters() if p.requires_grad]
    rates = {id(p): group_rates(cfg, name, p.ndim >= 2) for name, p in model.named_parameters()}

    def kind_of(p: nn.Parameter) -> tuple[bool, bool, float, float, bool]:
        rate, decay = rates[id(p)]
        # A scorer's head is not sharded, and torch's fused step takes either sharded or plain tensors.
        return rate != cfg.learning_rate, p.ndim < 2, rate, decay, not is_dtensor(p)

    groups = [
        {"params": [p for p in trained if kind_of(p) == kind], "lr": kind[2], "weight_decay": kind[3]}
        for kind in sorted({kind_of(p) for p in trained})  # the first group's rate is logged
    ]
    if cfg.optim == "muon":
        optimizer = muon_and_adamw(model, groups, cfg)
    elif cfg.optim == "adamw_8bit" or any(p.dtype == torch.bfloat16 for p in trained):
        optimizer = small_adamw(groups, cfg)
    else:
        # The unfused step on a GPU would allocate a temporary as large as all weights.
        fused = all(p.device.type == "cuda" for p in trained)
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        optimizer = AdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, fused=fused)
    return optimizer, LambdaLR(optimizer, lr_factor(cfg, total_steps))


def group_rates(cfg: OptimConfig, name: str, is_matrix: bool) -> tuple[float, float]:
    """Return the learning rate and weight decay of a parameter."""
    rate, decay = cfg.learning_rate, cfg.weight_decay if is_matrix else 0.0
    if cfg.loraplus_lr_ratio is not None and re.search(r"\.lora_(embedding_)?B\.", name):
        rate *= cfg.loraplus_lr_ratio
    options = next((given for pattern, given in cfg.param_groups.items() if re.search(pattern, name)), {})
    return float(options.get("learning_rate", rate)), float(options.get("weight_decay", decay))


def check_groups(model: nn.Module, cfg: OptimConfig) -> None:
    """Raise if a group of --param-groups or LoRA+ has no parameters."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for pattern in cfg.param_groups:
        if not any(re.search(pattern, name) for name in names):
            raise UserError(
                f"param_groups={pattern}: matches no trained parameter; use a part of a name, such as {names[0]}"
            )
    if cfg.loraplus_lr_ratio is not None and not hasattr(model, "peft_config"):
        raise UserError(f"loraplus_lr_ratio={cfg.loraplus_lr_ratio:g}: there are no adapters; set --lora.r")


def lr_factor(cfg: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the multiplier of the peak rate after `step` steps: linear warm-up, then --lr-scheduler-type's decay."""
    kind, minimum, warmup = cfg.lr_scheduler_type, cfg.min_lr_ratio, cfg.num_warmup(total_steps)
    decay_start = warmup
    if kind == "warmup_stable_decay":
        decay_start = max(warmup, total_steps - round(cfg.decay_ratio * total_steps))
    timescale = warmup or NO_WARMUP

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant" or step < decay_start:
            return 1.0
        if kind == "inverse_sqrt":
            return math.sqrt(timescale / (step - warmup + timescale))
        progress = (step - decay_start) / max(1, total_steps - decay_start)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return max(0.0, 1.0 - progress) if kind == "linear" else minimum + (1.0 - minimum) * cosine

    return factor


def advance(schedule: LambdaLR) -> None:
    """Advance the schedule by one step, even a skipped step."""
    with warnings.catch_warnings():  # torch warns if the first step is skipped
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        schedule.step()


def restore_schedule(schedule: LambdaLR, *, last_epoch: int, step_count: int) -> None:
    """Restore the step counts and compute the learning rates from them, as LambdaLR does."""
    schedule.last_epoch, schedule._step_count = last_epoch, step_count
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rate = base * factor(last_epoch)
        if isinstance(group["lr"], Tensor):  # torchao's optimizers keep a reference to it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = [float(group["lr"]) for group in groups]


# loss and step ---------------------------------------------------------------------------------------------------


def total_loss(out: LossOut, denominators: dict[str, Tensor]) -> Tensor:
    """Sum the weighted terms, each divided by its count over the whole optimizer step and all ranks."""
    assert out.terms.keys() <= denominators.keys(), f"terms {sorted(out.terms)} vs {sorted(denominators)}"
    terms = [term.weight * term.sum / denominators[name].clamp(min=1) for name, term in out.terms.items()]
    return torch.stack(terms).sum()


def term_metrics(out: LossOut) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metrics loss/<name>: each term's mean, unweighted."""
    return {f"loss/{name}": (term.sum.detach(), term.count) for name, term in out.terms.items()}


def launch_step(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    max_grad_norm: float,
    where: str,
    metrics: MetricSums | None = None,
    bad_steps: BadSteps | None = None,
) -> PendingStep:
    """Sum gradients over ranks, clip, check and step. A non-finite step is never applied (`bad_steps`).

    `metrics` are the step's metrics; their loss is checked too. If takes_gate(optimizer), the device checks and steps,
    and the host reads the outcome in PendingStep.wait(), which must be called before the next step. For other
    optimizers this function waits.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    limit = max_grad_norm if max_grad_norm > 0 else math.inf
    sum_gradients(model)
    checked = values_to_check(trained, metrics)
    read = copy_to_host(checked)
    is_gated, known = takes_gate(optimizer), set(optimizer.state)
    stepped = [p for p in trained if p.grad is not None]
    bad_steps = bad_steps or BadSteps()

    def wait() -> None:
        grad_norm, *loss = read()
        pending.grad_norm = grad_norm
        if problem := not_finite(grad_norm, *loss):
            if is_gated:
                undo_step(optimizer, known, stepped)
            bad_steps.skip(problem, where)
        else:
            if not is_gated:
                scale_gradients(trained, grad_norm, limit)
                optimizer.step()
            bad_steps.end()
        pending.skipped = bad_steps.counters.skipped()

    pending = PendingStep(wait)
    if is_gated:
        gated_step(optimizer, checked, limit)
    else:
        pending.wait()
    optimizer.zero_grad(set_to_none=True)
    advance(schedule)
    return pending


class PendingStep:
    """An optimizer step whose outcome the host reads later."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self.grad_norm = math.nan
        self.skipped: dict[str, float] = {}  # metric: steps skipped so far, including this step

    def wait(self) -> float:
        """Return the gradient norm; if the step is not finite, the first call skips it or stops the run."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()
        return self.grad_norm


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start a copy to the host and return a function that waits for it, but not for work launched after it."""
    if not values.is_cuda:
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return wait


# clipping and skipping on the device -----------------------------------------------------------------------------


def takes_gate(optimizer: Optimizer) -> bool:
    """Return whether its step divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1."""
    if isinstance(optimizer, RoundedAdamW):
        return True
    if not isinstance(optimizer, AdamW) or not all(group["fused"] for group in optimizer.param_groups):
        return False
    return not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])


def gated_step(
    optimizer: Any,
    checked: Tensor,  # (N,) gradient norm and other values that must be finite
    limit: float,
) -> None:
    """Step with gradients clipped to the norm `limit`; change nothing if a value is not finite."""
    optimizer.grad_scale = ((checked[0] + 1e-6) / limit).clamp(min=1.0).float()
    optimizer.found_inf = 1.0 - checked.isfinite().all().float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def undo_step(
    optimizer: Optimizer,
    known: set[Tensor],  # parameters that had moments before the step
    stepped: list[nn.Parameter],  # parameters that had a gradient
) -> None:
    """Undo the host-side state of a step that the device skipped."""
    if isinstance(optimizer, RoundedAdamW):  # torch's AdamW counts steps on the device
        optimizer.undo_step(stepped)
    for parameter in optimizer.state.keys() - known:
        del optimizer.state[parameter]


# non-finite steps ------------------------------------------------------------------------------------------------


def values_to_check(trained: list[nn.Parameter], metrics: MetricSums | None) -> Tensor:  # (1,) or (2,) float64
    """Return the gradient norm and, if known, the loss of the step; both are global, so equal on every rank.

    A loss may be infinite with a finite gradient (a target of probability 0 in float32).
    """
    values = [gradient_norm(trained)]
    if metrics is not None and "loss/total" in metrics.pairs:
        values.append(all_sum(metrics.pairs["loss/total"][0], "loss", everyone=True))
    return torch.stack([value.to(values[0].device, torch.float64) for value in values])


def not_finite(grad_norm: float, loss: float = 0.0) -> str | None:
    """Name the non-finite quantity of this step, or None."""
    if not math.isfinite(grad_norm):
        return f"gradient norm {grad_norm}"
    return None if math.isfinite(loss) else f"loss {loss}"


class BadSteps:
    """Skips non-finite steps or stops the run. Counts are in the checkpoint: a resumed run stops at the same step."""

    def __init__(
        self,
        cfg: OptimConfig | None = None,
        counters: Counters | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cfg, self.counters, self.note = cfg or OptimConfig(), counters or Counters(), note

    def skip(self, problem: str, where: str) -> None:
        """Count and log a skipped step, or raise if the run must stop."""
        counters, limit = self.counters, self.cfg.nan_skip_limit
        if self.cfg.nan_policy == "stop" or counters.skipped_in_a_row >= limit:
            after = f" after {limit} consecutive skipped steps" if self.cfg.nan_policy == "skip" else ""
            raise UserError(f"{where}: {problem} is not finite{after}; lower --learning-rate or fix these rows")
        counters.skipped_steps += 1
        counters.skipped_in_a_row += 1
        self.note(f"skipped {where}: {problem} is not finite ({counters.skipped_in_a_row} in a row, at most {limit})")

    def end(self) -> None:
        """Reset the count of consecutive skipped steps, after a finite step."""
        self.counters.skipped_in_a_row = 0


# Muon for matrices -----------------------------------------------------------------------------------------------


def muon_and_adamw(model: nn.Module, groups: list[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    """Build torch's Muon for block matrices, and AdamW for embeddings, heads, norms, biases and stacked experts."""
    trained = [p for group in groups for p in group["params"]]
    if hasattr(model, "peft_config"):
        raise UserError("optim=muon: not supported with LoRA, it needs full matrices; use --optim adamw or --lora.r 0")
    if any(is_dtensor(p) for p in trained):
        raise UserError("optim=muon: not supported with FSDP; use --parallel.mode replicate or --optim adamw")
    if any(p.dtype == torch.bfloat16 for p in trained):
        raise UserError("optim=muon: needs float32 weights; remove --trained-dtype bfloat16 or use --optim adamw")
    ends = [child for child in model.children() if isinstance(child, nn.Linear)]  # heads
    ends += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {id(p) for module in ends for p in module.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in excluded]
    chosen = {id(p) for p in matrices}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    return MuonAndAdamW(matrices, [group for group in others if group["params"]], cfg)


class MuonAndAdamW(Optimizer):
    """Muon and AdamW as one optimizer, with shared parameter groups and state for the schedule and checkpoints."""

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
    """Raise if the optimizer's package is missing; called before a model is loaded."""
    if cfg.optim == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"optim={cfg.optim}: torchao is not installed; run pip install -e '.[small]' or use --optim adamw"
        )


class RoundedAdamW(Optimizer):
    """AdamW with bfloat16 weights and moments and stochastic rounding; float32 parameters are not rounded."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step; uses `grad_scale` and `found_inf` if set, as torch's fused AdamW does (kernels.adamw.StepGuard)."""
        updates, index = [], 0  # the parameter's index seeds its random bits
        for group in self.param_groups:
            fixed = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            rates: dict[int, Rates] = {}  # keyed by step
            for parameter in group["params"]:
                index += 1
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
                tensors = ParamTensors(parameter, grad, state["exp_avg"], state["exp_avg_sq"])
                if is_dtensor(parameter):
                    tensors = ParamTensors(*map(local, tensors))
                updates.append(Update(tensors, rates[t], (t << 16 ^ index) % 2**31))
        is_gated = hasattr(self, "grad_scale")
        step_all_(updates, StepGuard(self.grad_scale, self.found_inf) if is_gated else None)

    def undo_step(self, stepped: list[nn.Parameter]) -> None:
        """Decrement the step count of the parameters that had a gradient in the last step."""
        for parameter in stepped:
            count_step(self.state[parameter]["step"], -1)


def count_step(
    count: Tensor,  # () float32, on the CPU
    change: int,
) -> int:
    """Change the count and return it. This runs for every parameter, and numpy is faster than torch for a scalar."""
    array = count.numpy()
    array += change
    return int(array)


def as_saved(slots: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer state of one parameter as plain tensors, for a checkpoint."""
    saved: dict[str, Tensor] = {}
    for key, slot in slots.items():
        shard = local(slot)
        if not _is_quantised(shard):
            saved[key] = slot
        elif is_dtensor(slot):
            from torch.distributed.tensor import DTensor

            saved[key] = DTensor.from_local(
                shard.dequantize(), slot.device_mesh, slot.placements, run_check=False, shape=slot.shape,
                stride=slot.stride(),
            )  # fmt: skip
        else:
            saved |= {key: shard.dequantize(), key + SCALE: shard.scale}
    return saved


@torch.no_grad()
def as_held(optimizer: Optimizer, parameter: nn.Parameter, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Invert as_saved: return the optimizer's form of the state, on the parameter's device and sharded like it."""
    slots = {}
    for key, value in saved.items():
        if key.endswith(SCALE):
            continue
        if key == "step":  # AdamW counts steps on the CPU unless it is fused
            slots[key] = value.to(parameter.device) if optimizer.defaults.get("fused") else value
            continue
        if not hasattr(optimizer, "_new_buffer"):  # only torchao's optimizers have it
            slots[key] = value.to(parameter.device, parameter.dtype)
            continue
        slots[key] = optimizer._new_buffer(parameter, key == "exp_avg")
        shard, scale = local(slots[key]), saved.get(key + SCALE)
        if _is_quantised(shard) and scale is not None and scale.shape == shard.scale.shape:
            from torchao.optim.quant_utils import quantize_8bit_with_qmap

            blocks = local(value).to(shard.device).view(len(scale), -1) / scale.to(shard.device).unsqueeze(1)
            shard.codes.copy_(quantize_8bit_with_qmap(blocks, shard.qmap).view(shard.shape))
            shard.scale.copy_(scale)
        else:
            shard.copy_(local(value))
    return slots


def _is_quantised(tensor: Tensor) -> bool:
    return hasattr(tensor, "codes")


# additional trained modules --------------------------------------------------------------------------------------


class TrainedModule:
    """A module trained alongside the policy (a critic, a value head), with a separate optimizer and checkpoint state.

    Every rank has a replica, initialised with rank 0's weights; gradients are summed over ranks. Parameters, buffers
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
        for weight, rank0_weight in zip(weights, tensors_from_main(weights if is_main() else None, name), strict=True):
            weight.copy_(rank0_weight)
        self.optimizer, self.schedule = build_optimizer(module, cfg, total_steps)
        self.counters = Counters()  # this module's non-finite steps
        self.bad_steps = BadSteps(cfg, self.counters, note)

    def step(self, where: str, *, skip: bool = False) -> None:
        """Step. `skip`: the policy's step was skipped, so only the schedule advances."""
        for parameter in self.module.parameters():
            if skip:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad /= context_size()  # all ranks that share rows computed the same gradient
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
        """Return parameters and buffers by name, and optimizer state as `NAME/exp_avg` etc."""
        tensors = self.module.state_dict()
        for name, parameter in self.module.named_parameters():
            slots = as_saved(self.optimizer.state.get(parameter, {}))
            tensors |= {f"{name}/{key}": value for key, value in slots.items()}
        return tensors

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(tensors[name])
        for name, parameter in self.module.named_parameters():
            saved = {key.removeprefix(f"{name}/"): tensors[key] for key in tensors if key.startswith(f"{name}/")}
            if saved:
                self.optimizer.state[parameter] = as_held(self.optimizer, parameter, saved)
