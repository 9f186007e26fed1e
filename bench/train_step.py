"""One GRPO training step of a whole model: a prompt shared by its group vs. a prompt per completion.

    python -m bench.train_step [--out rows.jsonl] [--layers 28] [--group 8] [--prompt 2048] [--completion 512]
    python -m bench.train_step --turns 8               # episodes whose turns are branches, as a tree vs. separate rows

Forward, clipped policy gradient and backward, with activation checkpointing in all layouts; no optimizer. The model is
a random Qwen3-1.7B on a GPU, a tiny model elsewhere. The rate counts logical tokens, a prompt once per
completion, so layouts are compared by the same work. Errors are of the whole gradient, against a run in the
next wider float, row by row with the model's own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from bench.common import QWEN3_1_7B, Row, alternate, emit, make_row, require_commit
from data.packing import Batch, Item, make_batches
from kernels.linear_logprob import TokenLogps, linear_logprob_loss
from trainer.parallel.comm import pick_device
from trainer.policy.attention import choose_attention
from trainer.policy.logps import Policy, head_of, predictor_states

TINY = QWEN3_1_7B | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Work:
    """G completions of one prompt, or the branches of G episodes, and their advantages."""

    items: list[Item]
    advantage: Tensor  # (G * turns,)

    @property
    def num_logical(self) -> int:
        return sum(len(item.ids) for item in self.items)

    @property
    def num_trained(self) -> int:
        return sum(sum(item.mask) for item in self.items)


def make_work(group: int, prompt: int, completion: int, vocab: int, device: torch.device, turns: int = 1) -> Work:
    """A turn is a branch that continues the first halves of earlier turns, as if the client had dropped the rest."""
    generator = torch.Generator().manual_seed(0)
    shared, items = torch.randint(vocab, (prompt,), generator=generator).tolist(), []
    for episode, own in enumerate(torch.randint(vocab, (group, turns, completion), generator=generator).tolist()):
        history = shared
        for ids in own:
            mask = [False] * len(history) + [True] * completion
            items.append(Item(history + ids, mask, prompt, episode=episode if turns > 1 else None))
            history = history + ids[: completion // 2]
    advantage = torch.randn(group, generator=generator).repeat_interleave(turns)
    return Work(items, advantage.to(device))


def make_policy(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, *, attention: str) -> Policy:
    """Create a model with random weights and activation checkpointing."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=dtype, attn_implementation="sdpa")
    choose_attention(model, attention, device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return Policy(model=model, tokenizer=None, source="random", device=device, compute_dtype=dtype)


def packed_states(policy: Policy, batch: Batch) -> Tensor:  # (N, D)
    """Return hidden states as in the trainer, with the batch's attention spans."""
    return predictor_states(policy, policy.model, batch)


def plain_states(policy: Policy, batch: Batch) -> Tensor:  # (N, D)
    """Return hidden states of rows of equal length with transformers' causal attention."""
    hidden = policy.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # (R, T, D)
    return hidden.flatten(0, 1)[batch.index]


def step(
    policy: Policy, work: Work, batches: list[Batch], states: Callable[[Policy, Batch], Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of all parameters by name."""
    for batch in batches:
        advantage = work.advantage[batch.sequence]  # (N,)

        def loss_fn(tokens: TokenLogps, rows: Tensor, advantage: Tensor = advantage) -> tuple[Tensor, None]:
            ratio, a = (tokens.logp - tokens.logp.detach()).exp(), advantage[rows]  # the first step on a rollout
            return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / work.num_trained, None

        hidden = states(policy, batch)
        loss, _ = linear_logprob_loss(hidden, target=batch.target, loss_fn=loss_fn, **head_of(policy.model))
        loss.backward()
    made = {name: x.grad for name, x in policy.model.named_parameters()}
    policy.model.zero_grad(set_to_none=True)
    return made


def distance(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative distance of two gradients, over all parameters."""
    apart = sum((got[name].to(x.dtype) - x).double().square().sum() for name, x in exact.items())
    return (apart / sum(x.double().square().sum() for x in exact.values())).sqrt().item()


def measure(
    shape: dict[str, Any], group: int, prompt: int, completion: int, seconds: float, turns: int = 1
) -> list[Row]:
    device = pick_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = make_policy(shape, device, dtype, attention="auto")
    work = make_work(group, prompt, completion, shape["vocab_size"], device, turns)
    apart = [replace(item, episode=None) for item in work.items]

    def lay(items: list[Item] = apart, **options: Any) -> list[Batch]:
        multiple = policy.row_multiple if options.get("packing", True) else 1
        made = make_batches(items, **{"max_tokens": work.num_logical, "multiple": multiple, **options})
        return [batch.to(device) for batch in made]

    layouts = {
        **({"tree": (lay(work.items, share_prompt=True), packed_states)} if turns > 1 else {}),
        "shared prompt": (lay(share_prompt=True), packed_states),
        "packed": (lay(), packed_states),
        "rows, sdpa": (lay(packing=False), plain_states),
    }
    calls = {name: partial(step, policy, work, *layout) for name, layout in layouts.items()}
    timings = alternate(calls, seconds=seconds)
    wide = make_policy(shape, device, WIDER[dtype], attention="sdpa")
    wide.model.load_state_dict(policy.model.state_dict())
    exact = step(wide, work, lay(packing=False, max_tokens=max(len(item.ids) for item in apart)), plain_states)
    packed = calls["packed"]()
    sizes = {"G": group, "P": prompt, "R": completion, "layers": shape["num_hidden_layers"], "D": shape["hidden_size"]}
    sizes |= {"turns": turns} if turns > 1 else {}
    rows = []
    for name, timing in timings.items():
        made = calls[name]()
        computed = sum(batch.num_computed for batch in layouts[name][0])
        rows.append(make_row(
            "train_step", name, timing, shape=sizes, dtype=dtype, work=work.num_logical, unit="tokens",
            errors={"gradient": distance(made, exact)},
            against={other: timings[other] for other in ("shared prompt", "packed", "rows, sdpa")},
            extra={"gap_to_packed": distance(made, packed), "computed_tokens": computed},
        ))  # fmt: skip
    return rows


def main(
    out: Path | None = None,
    layers: int | None = None,
    group: int = 8,
    prompt: int | None = None,
    completion: int | None = None,
    turns: int = 1,
    seconds: float = 3.0,
) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        layers: Depth of the model. None: 28 on a GPU, 2 elsewhere.
        group: Completions of the prompt.
        prompt: Prompt tokens. None: 2048 on a GPU, 128 elsewhere.
        completion: Tokens per completion, or per turn. None: 512 on a GPU, 32 elsewhere.
        turns: Turns of each episode.
        seconds: Minimum duration of the loop, which has at least 15 rounds (3 on a CPU).
    """
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = QWEN3_1_7B if on_cuda else TINY
    shape = shape | ({} if layers is None else {"num_hidden_layers": layers})
    prompt, completion = prompt or (2048 if on_cuda else 128), completion or (512 if on_cuda else 32)
    emit(measure(shape, group, prompt, completion, seconds, turns), out)


if __name__ == "__main__":
    tyro.cli(main)
