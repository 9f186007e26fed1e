"""The policy, and the log-probs of its tokens.

    out = token_logps(policy, batch, temperature=1.0)              # log-prob and entropy of each trained token
    total, outputs = token_loss(policy, batch, loss_fn)            # the loss, computed inside the head pass
    ref_logp = reference_logps(policy, batch)                      # reference log-probs, no grad

Logits of a whole micro-batch are never stored: kernels/linear_logprob.py takes hidden states and the head's weight.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from data.packing import Batch, Item, make_batches
from data.strided import StridedBatch
from data.user_code import name_of
from kernels.linear_logprob import Impl, LossFn, TokenLogps, linear_log_collision, linear_logprob, linear_logprob_loss
from rollout.engine import context_of
from rollout.engines.exact import head_impl
from rollout.engines.forward import logit_options
from rollout.state_layers import boundaries, carried_state, prepare_layers
from trainer.config.errors import first_line
from trainer.files.tensor_files import TensorFiles
from trainer.parallel.comm import context_size
from trainer.parallel.dtensor import Gatherer
from trainer.parallel.ranks import is_main
from trainer.parallel.watch import log
from trainer.policy.adapters import ADAPTER
from trainer.policy.attention import (
    attention_masks,
    caps_scores,
    is_exact,
    is_sliced,
    rank_slice,
    row_multiple,
    uses_flex,
)

MAX_PADDING = 0.1  # of the tokens of a micro-batch, if the model needs one sequence per row
SMALL = 4096  # tokens of a micro-batch that keeps the host busy for longer than the GPU


@dataclass
class Policy:
    """A model under training, its tokenizer, and its reference."""

    model: nn.Module  # transformers causal LM, or peft's wrapper around one
    tokenizer: Any
    source: str  # hub id or folder the base weights came from
    device: torch.device
    compute_dtype: torch.dtype
    revision: str | None = None  # of the source, on the hub
    reference: nn.Module | None = None  # a frozen copy (full fine-tuning with a KL term)
    reference_adapter: str | None = None  # name of a frozen second adapter (continuing a LoRA run)
    is_compiled: bool = False  # the blocks of the model and the reference are compiled
    is_sharded: bool = False  # with FSDP: ranks must run the same number of forward passes
    reshard_after_forward: bool = True  # for sharded blocks
    reduce_once: bool = False  # reduce gradients of sharded weights only after the last micro-batch
    shares_prompts: bool = True  # compute the prompt of a pair once; False if each copy counts
    packs: bool = True  # several sequences per row; check_logps() clears it if they would leak into each other
    can_share: bool = True  # completions may follow one copy of their prompt; cleared likewise
    positions: Tensor | None = None  # (R, T) position_ids of the last batch, for the noise of --neftune-noise-alpha
    replays_routes: bool = False  # the model takes the experts that the sampler recorded (rollout/routes.py)
    router: Any = None  # RouterLoss (trainer/policy/experts.py), if expert load is balanced
    companions: list[Policy] = field(default_factory=list)  # other models run every step; compiled with the policy
    wide_stream: Any = None  # handle of the hook of carry_float32()
    files: TensorFiles | None = None  # weights not loaded yet: parallelize() reads each rank's shards

    @property
    def context_length(self) -> int | None:
        return context_of(causal_lm(self.model).config)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return self.compute_dtype if self.compute_dtype == torch.bfloat16 else None

    @property
    def generation_eos(self) -> int | list[int] | None:
        return getattr(causal_lm(self.model).generation_config, "eos_token_id", None)

    @property
    def row_multiple(self) -> int:
        """Multiple that make_batches must pad rows to."""
        return row_multiple(causal_lm(self.model).config) if self.packs else 1

    def layout(self, *, packing: bool = True, share_prompt: bool = False) -> dict[str, Any]:
        """Return the options of make_batches for this model."""
        return {
            "packing": packing and self.packs,
            "share_prompt": share_prompt and self.can_share,
            "multiple": self.row_multiple,
            # Only flex attention skips masked tiles; layers with state take the boundaries of one row.
            "one_row": uses_flex(causal_lm(self.model).config) or self.carried_state is not None,
            "max_padding": 1.0 if self.packs and self.carried_state is None else MAX_PADDING,
            "small": SMALL if self.device.type == "cuda" else 0,
        }

    @property
    def is_exact(self) -> bool:
        """Whether the in-process engine computes the same bits (--exact-sampling)."""
        return is_exact(causal_lm(self.model).config)

    @property
    def carried_state(self) -> str | None:
        lm = causal_lm(self.model)
        return carried_state(lm.config, type(lm))

    @property
    def is_lora(self) -> bool:
        return hasattr(self.model, "peft_config")


def causal_lm(model: nn.Module) -> Any:
    """Return the transformers model without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def token_logps(policy: Policy, batch: Batch, *, temperature: float = 1.0) -> TokenLogps:
    """Return the log-prob (with gradient) and entropy of every trained token, in the batch's order."""
    return _token_logps(policy, policy.model, batch, temperature)


def token_loss(
    policy: Policy,
    batch: Batch,
    loss_fn: LossFn,
    *,
    temperature: float = 1.0,
    states_loss: Callable[[Tensor], Tensor] | None = None,
    sparse: bool = False,
) -> tuple[Tensor, list[Any]]:
    """Compute a loss summed over trained tokens inside the head pass, a third cheaper than token_logps plus backward.

    `loss_fn(tokens, index)` gets the log-probs of the trained tokens at `index`, one chunk at a time, and returns a
    scalar and any other output. Returns the sum of the scalars, which has a gradient, and the list of other outputs.

    `states_loss` computes another scalar from the (N, D) states that predict the tokens, and is added to the sum: the
    loss of another head, from the same pass.

    `sparse`: most tokens have no gradient, so a host sync to find the rest is worth it.

    With context parallelism each rank computes the loss of all tokens, without that saving and without `states_loss`.
    """
    lm = causal_lm(policy.model)
    loss_fn = partial(call_loss, loss_fn, ())
    if is_sliced(lm.config):
        assert states_loss is None, "no rank has the states of all tokens"
        tokens = token_logps(policy, batch, temperature=temperature)
        loss, output = loss_fn(tokens, torch.arange(len(batch.target), device=policy.device))
        return loss + tokens.logp[:0].sum(), [output]  # backward() must work even if the loss ignores the tokens
    hidden = predictor_states(policy, lm, batch)
    total, outputs = linear_logprob_loss(
        hidden, target=batch.candidates, loss_fn=loss_fn, temperature=temperature, ignore_index=None,
        skip=sparse or skips(policy), impl=impl_of(policy, lm), **head_of(lm),
    )  # fmt: skip
    return total if states_loss is None else total + states_loss(hidden), outputs


def call_loss(loss_fn: Callable[..., Any], shape: Sequence[int], /, *args: Any, **options: Any) -> tuple[Tensor, Any]:
    """Return the loss and the other output of `loss_fn`; raise if the loss has another shape or no gradient."""
    result = loss_fn(*args, **options)
    loss, output = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor):
        found = f"{type(loss).__name__} instead of a tensor"
    elif loss.shape != torch.Size(shape):
        found = f"shape {tuple(loss.shape)} instead of {tuple(shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "a loss without a gradient; compute it from log-probs, without detach() or torch.no_grad()"
    else:
        return loss, output
    raise UserError(f"{name_of(getattr(loss_fn, 'loss', loss_fn))}: returned {found}")  # .loss: of a PolicyLoss


def skips(policy: Policy) -> bool:
    """Return whether the head skips tokens without a gradient; on a GPU this would cost a host sync per micro-batch."""
    return policy.device.type != "cuda"


@torch.no_grad()
def reference_logps(policy: Policy, batch: Batch, *, temperature: float = 1.0) -> Tensor:  # (N,)
    if batch.routes is not None:  # another model, with its own choice of experts
        batch = replace(batch, routes=None)  # without the batch's block masks
    with as_reference(policy) as model:
        return _token_logps(policy, model, batch, temperature).logp


@contextlib.contextmanager
def as_reference(policy: Policy) -> Iterator[nn.Module]:
    """Context manager: yield the model that computes reference log-probs."""
    if policy.reference is not None:
        yield policy.reference
    elif policy.reference_adapter is not None:
        was_training = policy.model.training
        policy.model.set_adapter(policy.reference_adapter)
        policy.model.eval()  # the saved adapter may have dropout
        try:
            yield policy.model
        finally:
            policy.model.set_adapter(ADAPTER)
            policy.model.train(was_training)
    else:
        assert policy.is_lora, "no reference was loaded: call open_policy(cfg, with_reference=True)"
        with without_adapter(policy):
            yield policy.model


@contextlib.contextmanager
def without_adapter(policy: Policy) -> Iterator[None]:
    """Context manager: run the base model without its adapter.

    Compiled blocks multiply the adapter's output by zero instead of skipping it: a block without the addition compiles
    to different kernels, which may sum norms in another order. The log-probs of a policy that still equals its
    reference would then differ from the reference's by bfloat16 rounding.
    """
    config = policy.model.peft_config[ADAPTER]
    only_adds = not (config.use_dora or config.modules_to_save or config.lora_dropout)
    if not (policy.is_compiled and only_adds):
        with policy.model.disable_adapter():
            yield
        return
    from peft.tuners.lora import LoraLayer

    layers = [module for module in policy.model.modules() if isinstance(module, LoraLayer)]
    scales = [layer.scaling for layer in layers if ADAPTER in layer.scaling]
    before = [scale[ADAPTER] for scale in scales]
    try:
        for scale in scales:
            scale[ADAPTER] = 0.0
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale[ADAPTER] = value


def _token_logps(policy: Policy, model: nn.Module, batch: Batch, temperature: float) -> TokenLogps:
    lm = causal_lm(model)
    part = rank_slice(lm.config, batch)
    hidden = predictor_states(policy, lm, part.batch, part.num_keys)
    tokens = linear_logprob(
        hidden, target=part.batch.candidates, temperature=temperature, ignore_index=None, skip=skips(policy),
        impl=impl_of(policy, lm), **head_of(lm),
    )  # fmt: skip
    return TokenLogps(*part.gather(*tokens))


def impl_of(policy: Policy, lm: Any) -> Impl:
    """Return the implementation of linear_logprob."""
    return head_impl(policy.device) if is_exact(lm.config) else "auto"


def logps_in_training(policy: Policy, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    """Return log-probs of (prompt, completion) pairs as a training step computes them, at temperature 1."""
    items = [Item([*prompt, *ids], [False] * len(prompt) + [True] * len(ids), len(prompt)) for prompt, ids in pairs]
    logps: list[list[float]] = [[] for _ in items]
    longest = max(len(item.ids) for item in items)
    for batch in make_batches(items, max_tokens=2 * longest, **policy.layout(share_prompt=True)):
        on_device, found = batch.to(policy.device), []

        def loss_fn(tokens: TokenLogps, index: Tensor, found: list[Tensor] = found) -> tuple[Tensor, None]:
            found.append(tokens.logp.detach())
            return tokens.logp.sum(), None

        token_loss(policy, on_device, loss_fn)
        for item, logp in zip(batch.sequence.tolist(), torch.cat(found).tolist(), strict=True):
            logps[item].append(logp)
    return logps


@torch.no_grad()
def token_log_collision(policy: Policy, batch: Batch) -> Tensor:  # (N,)
    """Return log sum_v p(v)^2 for the distribution of each trained token."""
    lm = causal_lm(policy.model)
    part = rank_slice(lm.config, batch)
    hidden = predictor_states(policy, lm, part.batch, part.num_keys)
    return part.gather(linear_log_collision(hidden, **head_of(lm)))[0]


def predictor_states(policy: Policy, lm: Any, batch: Batch, num_keys: int | None = None) -> Tensor:  # (N, D)
    """Return the last hidden states at the positions that predict trained tokens."""
    return as_head_takes(policy, hidden_states(policy, lm, batch, num_keys)[batch.index])


def hidden_states(
    policy: Policy, lm: Any, batch: Batch | StridedBatch, num_keys: int | None = None
) -> Tensor:  # (R * T, D)
    """Return the last hidden states at all positions, in row order. `num_keys`: keys of the whole row, for a slice."""
    policy.positions, options = batch.position_ids, {}
    forced = getattr(batch, "routes", None) if policy.replays_routes else None
    routes = {} if forced is None else {"routes": forced.flatten(0, 1)}
    one_per_row = isinstance(batch, Batch) and len(batch.rows) <= len(batch.used)
    carries_state = carried_state(lm.config, type(lm)) is not None
    if one_per_row and (carries_state or not policy.packs):
        pass  # the model's own causal mask and positions: padding comes last, so no token depends on it
    else:
        assert policy.packs, "more than one sequence per row"
        masks = attention_masks(lm.config, batch, num_keys)
        options = {"attention_mask": masks, "position_ids": batch.position_ids}
        if carries_state:
            options = boundaries(batch, masks)
    with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.autocast_dtype is not None):
        output = lm.base_model(input_ids=batch.input_ids, use_cache=False, **options, **routes)
    return output.last_hidden_state.flatten(0, 1)  # of (R, T, D)


def as_head_takes(policy: Policy, hidden: Tensor) -> Tensor:
    """Cast for the head: autocast leaves the last norm in float32, but the engine's head runs in compute_dtype."""
    return hidden if policy.autocast_dtype is None else hidden.to(policy.autocast_dtype)


def head_of(lm: Any) -> dict[str, Any]:
    """Return the head arguments of the log-prob kernels: weight, bias, logit scale and logit cap."""
    head, (scale, softcap) = lm.get_output_embeddings(), logit_options(lm.config.get_text_config())
    gather = getattr(head, "gather", None) or Gatherer()  # shard_model sets head.gather
    return {"weight": gather(head.weight), "bias": getattr(head, "bias", None), "scale": scale, "softcap": softcap}


def reject_context(name: str, reason: str) -> None:
    """Raise if ranks share rows, for a model that needs whole rows."""
    if context_size() > 1:
        raise UserError(
            f"parallel.context={context_size()}: model={name} must compute whole rows ({reason}); remove "
            "--parallel.context"
        )


def other_attention(lm: Any) -> str:
    """Return a message's last clause, for problems that may be due to flex attention."""
    other = "sdpa" if getattr(lm, "_supports_sdpa", True) and not caps_scores(lm) else "eager"
    return f"; try --attn-implementation {other}" if uses_flex(lm.config) else ""


@contextlib.contextmanager
def reject_if_failing() -> Iterator[None]:
    """Context manager: turn an error in the model's code into a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # not the model's fault
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the model's code fails ({type(error).__name__}: {first_line(error)})") from None


def choose_layout(policy: Policy, check: Callable[[Policy], None]) -> None:
    """Choose the first layout that passes `check`: packed with a shared prompt, packed, or one sequence per row.

    `check` raises a UserError with the problem. The last layout is the model's own forward pass, which is correct for
    every causal model, including models whose layers carry state from one token to the next.
    """
    lm, kind, problems = causal_lm(policy.model), policy.carried_state, []
    layouts = [(True, True), (True, False), (False, False)]
    if kind is not None:
        problems = [f"{kind} layers of model_type={lm.config.model_type} carry state from one token to the next"]
        layouts = layouts[0 if prepare_layers(lm) else 1 :]
        if "fla" in sys.modules and policy.device.type == "cuda" and is_main():
            log("flash-linear-attention compiles and tunes its kernels; the first time this takes about a minute")
    if window := getattr(lm.config.get_text_config(), "window_size", None):  # GPT-Neo; too long for the probe
        problems = [f"window_size={window} of model_type={lm.config.model_type} counts positions of the row"]
        layouts = layouts[-1:]
    try:
        for policy.packs, policy.can_share in layouts:
            policy.model.eval()
            try:
                check(policy)
            except UserError as error:
                problems.append(str(error))
                reject_context(policy.source, str(error))
            else:
                break
        else:
            raise UserError(
                f"model={policy.source}: {problems[-1]}; this architecture is not supported{other_attention(lm)}"
            )
    finally:
        policy.model.train()
    if problems and not policy.can_share and is_main():
        what = "prompts are not shared" if policy.packs else "one sequence per row, and prompts are not shared"
        hint = "" if kind else other_attention(lm)
        log(f"model={policy.source}: {what}: {'; '.join(dict.fromkeys(problems))}{hint}")


def share_batches(policy: Policy, other: Policy) -> None:
    """Give both models the layout that both support: `other` runs the policy's batches."""
    policy.packs = other.packs = policy.packs and other.packs
    policy.can_share = other.can_share = policy.can_share and other.can_share


def check_logps(policy: Policy) -> None:
    """Choose the layout of rows, in which packed sequences must not leak into each other; raise if log-probs differ
    from transformers' forward in every layout, such as for architectures that scale logits in another way.
    """
    choose_layout(policy, _check_logps)


def _check_logps(policy: Policy) -> None:
    """Raise if the current layout does not work. Three sequences have their own prompt and three share one."""
    vocab = causal_lm(policy.model).get_output_embeddings().weight.shape[0]
    prompt, *rest = (
        [(step * i + 1) % vocab for i in range(n)]
        for step, n in ((5, 4), (7, 7), (13, 7), (17, 7), (3, 3), (11, 3), (19, 3))
    )
    items = [Item(ids, [False] + [True] * 6) for ids in rest[:3]]
    items += [Item(prompt + ids, [False] * 4 + [True] * 3, 4) for ids in rest[3:]]
    batch = probe_batch(policy, items)
    # The middle ones have neighbours on both sides.
    packed = values_without_leak(policy, batch, (1, 4), lambda policy, batch: token_logps(policy, batch).logp)
    ids = torch.tensor([items[i].ids for i in batch.rows], device=policy.device)
    trained = torch.tensor([items[i].mask[1:] for i in batch.rows], device=policy.device)
    with (
        reject_if_failing(),
        torch.no_grad(),
        torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.autocast_dtype is not None),
    ):
        logp = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
    want = logp.gather(2, ids[:, 1:, None]).squeeze(2)[trained]  # (N,)
    reject_gap(policy, packed, want, "packed log-probs" if policy.packs else "log-probs")


def probe_batch(policy: Policy, items: Sequence[Item]) -> Batch:
    """Lay out all items in one batch, with padding after each if they have separate rows."""
    options = policy.layout(share_prompt=True) | {"one_row": True, "max_padding": 1.0}
    (batch,) = make_batches(items, max_tokens=64, **options | ({} if policy.packs else {"multiple": 8}))
    return batch.to(policy.device)


def reject_gap(policy: Policy, values: Tensor, want: Tensor, what: str) -> None:  # (N,) both
    """Raise if values differ by more than rounding, which grows with them: bfloat16 rounds 10 nats by 0.03."""
    limit = 1e-3 if policy.compute_dtype == torch.float32 else 0.25
    limit *= max(1.0, want.abs().max().item() / 10)
    gap = (values - want).abs().max().item()
    if not gap < limit:
        raise UserError(f"{what} differ from transformers' forward by {gap:.3g} (limit {limit:.3g})")


def values_without_leak(
    policy: Policy, batch: Batch, sequences: Sequence[int], function: Callable[[Policy, Batch], Tensor]
) -> Tensor:  # (N, ...)
    """Return function(policy, batch); raise if its values for `sequences` depend on the embeddings of others.

    Without a leak, their gradient is exactly 0: masked attention multiplies by 0, and other layers work per token. So
    this check needs no tolerance, unlike log-probs, whose last bits depend on matmul sizes (experts). It uses the run's
    own kernels, weights and dtype, because a float32 copy of the weights may not fit. bfloat16 does not hide a leak: it
    has the exponents of float32, and the gradient consists of the leak alone, so it cannot be rounded away.

    Layers that carry state may use other kernels in training mode (mamba-ssm), so both modes are probed.
    """
    if policy.model.training is False and policy.packs and policy.carried_state:
        policy.model.train()
        values_without_leak(policy, batch, sequences, function)
        policy.model.eval()
    lm, embeddings = causal_lm(policy.model), []

    def record(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    with (
        reject_if_failing(),
        torch.enable_grad(),
        lm.get_input_embeddings().register_forward_hook(record),
    ):
        values = function(policy, batch)
        chosen = torch.isin(batch.sequence, torch.tensor(sequences, device=policy.device))  # (N,)
        (gradient,) = torch.autograd.grad(values[chosen].sum(), embeddings)  # (R, T, D)
    # With context parallelism the embeddings are a slice of each row, and own_start is still a position in the row.
    starts, length = rank_slice(lm.config, batch).batch.own_start, batch.own_start.shape[1]  # (R, T)
    starts = starts + length * torch.arange(len(starts), device=policy.device).unsqueeze(1)
    index = batch.index[chosen]
    own = torch.isin(starts, batch.own_start.flatten()[index] + index // length * length)
    leak = gradient.abs().amax(dim=-1).masked_fill(own, 0.0).amax()
    if not leak == 0:
        raise UserError(
            f"packed sequences leak into each other (gradient {leak:.3g} with respect to the embeddings of another "
            "sequence, must be 0)"
        )
    return values.detach()
