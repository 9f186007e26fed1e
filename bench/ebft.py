"""One optimizer step of strided energy-based fine-tuning: one shared row with a cache vs. one row per sample.

    python -m bench.ebft [--out rows.jsonl] [--layers 28] [--tokens 4096] [--stride 8] [--generated 8] [--samples 4]

Both continue one document of random ids from all anchors, compute features with a frozen copy, and train. Weights are
random, with the shape of Qwen3-0.6B on a GPU and a tiny shape elsewhere.

    shared row, cached  the trainer's layout: the document once, all samples after it; a token costs one query
    step-major, dense   the authors' layout: the document repeated per sample, the tokens of one step adjacent, the
                        whole sequence recomputed for every token, dense masks through sdpa

Only layout, cache and masks differ. The second avoids unrelated costs: its mask is built once, its rows run as one
batch, and it computes logits only for tokens that are sampled or trained, with strop's head, sampler and fused
log-probs. It trains cross-entropy on every copy of the document, which is part of the layout.

The rate counts generated tokens over the whole step. AdamW runs with a learning rate of 0, so all steps see the same
weights. Errors are of the log-probs of the same tokens, and of the gradient for the same advantages, against the
second layout in the next wider float; gaps are between the two layouts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from bench.common import QWEN3_0_6B, Row, alternate, emit, make_row, relative_error, require_commit
from bench.train_step import TINY, WIDER, distance, make_policy
from data.strided import Document, StridedBatch, StridedPlan, make_strided
from kernels.linear_logprob import TokenLogps, linear_logprob, linear_logprob_loss
from losses import ebft
from rollout.engines.local import evaluating
from rollout.engines.strided import continue_documents, draw_next
from trainer.config.blocks import DataConfig, ModelConfig
from trainer.config.ebft import EbftConfig, FeatureConfig, StridedConfig
from trainer.ebft import strided
from trainer.ebft.features import FeatureNetwork, Features, blocks_of, states_of
from trainer.ebft.strided import StridedStep
from trainer.parallel.comm import pick_device
from trainer.policy.attention import span_masks
from trainer.policy.logps import Policy, as_head_takes, head_of, hidden_states

SHARED, STEP_MAJOR = "shared row, cached", "step-major, dense"


@dataclass(frozen=True)
class Work:
    """Inputs of both layouts."""

    cfg: EbftConfig
    policy: Policy
    network: FeatureNetwork
    document: Document
    seeds: Tensor  # (A, n) int64

    @property
    def plan(self) -> StridedPlan:
        return self.cfg.strided.plan

    @property
    def num_generated(self) -> int:
        return self.seeds.numel() * self.plan.generate_max_len


class SharedRow:
    """Layout of the trainer."""

    def __init__(self, work: Work) -> None:
        self.work = work
        (row,) = make_strided([work.document], work.plan, max_tokens=1, multiple=work.policy.row_multiple)
        self.row: StridedBatch = row.to(work.policy.device)
        self.num_computed = row.num_computed

    def generate(self) -> Tensor:  # (A, n, G)
        policy = self.work.policy
        return continue_documents(
            policy.model, self.row, partial(span_masks, policy.model.config), seeds=self.work.seeds,
            temperature=self.work.cfg.temperature, autocast_dtype=policy.autocast_dtype,
        ).ids  # fmt: skip

    def add_rewards(self, ids: Tensor) -> Tensor:  # (A, n)
        (advantage,) = strided.add_rewards(self.work.network, self._step(ids)).advantage
        return advantage

    def train(self, ids: Tensor, advantage: Tensor) -> None:
        strided.backward(self.work.cfg, self.work.policy, replace(self._step(ids), advantage=[advantage]))

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:  # (A, n, G)
        policy, row = self.work.policy, self.row.with_generated(ids)
        hidden = hidden_states(policy, policy.model, row)[row.predictor.flatten()]
        return score(self.work, hidden, ids)

    def _step(self, ids: Tensor) -> StridedStep:
        return StridedStep([self.row.with_generated(ids)], [torch.zeros(ids.shape, device=ids.device)])


class StepMajor:
    """n rows of F = L + G * A positions; token s of anchor a is at L + s * A + a in the row of its sample."""

    def __init__(self, work: Work) -> None:
        self.work = work
        device, plan = work.policy.device, work.plan
        self.text = torch.tensor(work.document.ids, device=device)  # (L,)
        self.anchor = torch.tensor(work.plan.anchors(work.document), device=device)  # (A,)
        length, num_anchors, generated = len(self.text), len(self.anchor), plan.generate_max_len
        step = torch.arange(generated, device=device)
        self.place = length + step * num_anchors + torch.arange(num_anchors, device=device).unsqueeze(1)  # (A, G)
        self.predictor = torch.cat([self.anchor.unsqueeze(1) - 1, self.place[:, :-1]], dim=1)  # (A, G)
        self.target_place = self.anchor.unsqueeze(1) + step  # (A, G)
        self.position_ids = torch.cat([torch.arange(length, device=device), self.target_place.T.flatten()])  # (F,)
        self.mask = self._mask()
        self.num_computed = plan.n_samples_per_prompt * len(self.position_ids)

    def generate(self) -> Tensor:  # (A, n, G)
        work, policy = self.work, self.work.policy
        rows = self.text.expand(work.plan.n_samples_per_prompt, -1)  # (n, L), growing by A per step
        drawn = []
        with evaluating(policy.model, policy.autocast_dtype):
            for number in range(work.plan.generate_max_len):
                states = self._hidden(policy.model, rows)[:, self.predictor[:, number]]  # (n, A, D)
                token, _ = draw_next(
                    policy.model, states.flatten(0, 1), work.seeds.T.flatten(), number, work.cfg.temperature
                )
                drawn.append(token.view(len(rows), -1))
                rows = torch.cat([rows, drawn[-1]], dim=1)
        return torch.stack(drawn, dim=-1).transpose(0, 1).contiguous()

    @torch.no_grad()
    def add_rewards(self, ids: Tensor) -> Tensor:  # (A, n)
        network, frozen = self.work.network, self.work.policy.reference
        blocks, rows = blocks_of(frozen, "random"), self._rows(ids)
        last = torch.cat([self.place[:, -1], self.target_place[:, -1]])  # features of the last token
        places = (torch.arange(len(rows), device=last.device).unsqueeze(1) * rows.shape[1] + last).flatten()
        with states_of([blocks[number - 1] for number in network.layers], places) as states:
            self._hidden(frozen, rows)
        features = ebft.token_features(states, normalize=network.cfg.feature_norm).unflatten(0, (len(rows), -1))
        rollout, target = features.chunk(2, dim=1)  # (n, A, D) both
        reward = network.measure(Features(rollout.transpose(0, 1), target[0])).reward
        return ebft.advantage_of(reward, advantage_estimator=network.cfg.advantage_estimator)

    def train(self, ids: Tensor, advantage: Tensor) -> None:
        work, rows = self.work, self._rows(ids)
        features, lm, length = work.cfg.features, work.policy.model, len(self.text)
        hidden = as_head_takes(work.policy, self._hidden(lm, rows))  # (n, F, D)
        of_token = (
            advantage.T.unsqueeze(-1).expand(-1, -1, ids.shape[2]).flatten()
        )  # in the order of ids.transpose(0, 1)
        num_text = len(rows) * (length - 1)

        def policy_loss(tokens: TokenLogps, chosen: Tensor) -> tuple[Tensor, None]:
            return -features.rl_coef * (tokens.logp * of_token[chosen]).sum() / len(of_token), None

        def target_loss(tokens: TokenLogps, chosen: Tensor) -> tuple[Tensor, None]:
            return -features.ce_coef * tokens.logp.sum() / num_text, None

        policy, _ = linear_logprob_loss(
            hidden[:, self.predictor].flatten(0, 2), target=ids.transpose(0, 1).flatten(), loss_fn=policy_loss,
            temperature=work.cfg.temperature, ignore_index=None, **head_of(lm),
        )  # fmt: skip
        ce, _ = linear_logprob_loss(
            hidden[:, : length - 1].flatten(0, 1), target=rows[:, 1:length].flatten(), loss_fn=target_loss,
            ignore_index=None, **head_of(lm),
        )  # fmt: skip
        (policy + ce).backward()

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:  # (A, n, G)
        hidden = self._hidden(self.work.policy.model, self._rows(ids))[:, self.predictor].transpose(0, 1)
        return score(self.work, hidden.flatten(0, 2), ids)

    def _rows(self, ids: Tensor) -> Tensor:  # (n, F)
        text = self.text.expand(ids.shape[1], -1)
        return torch.cat([text, ids.permute(1, 2, 0).flatten(1)], dim=1)

    def _hidden(self, lm: Any, rows: Tensor) -> Tensor:  # (n, F, D)
        """Compute hidden states. Rows may be truncated, because no token attends to a later step."""
        policy, width = self.work.policy, rows.shape[1]
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=policy.autocast_dtype is not None):
            return lm.base_model(
                input_ids=rows, attention_mask=self.mask[:, :, :width, :width],
                position_ids=self.position_ids[:width].expand(len(rows), -1), use_cache=False,
            ).last_hidden_state  # fmt: skip

    def _mask(self) -> Tensor:  # (1, 1, F, F) bool
        length, num_anchors, width = len(self.text), len(self.anchor), len(self.position_ids)
        place = torch.arange(width, device=self.text.device)
        query, key = place.unsqueeze(1), place
        seen = torch.cat([place[:length] + 1, self.anchor.repeat(self.place.shape[1])])  # (F,) visible document tokens
        document = (key < length) & (key < seen.unsqueeze(1))
        own = (length <= key) & (key <= query) & ((query - key) % num_anchors == 0)  # earlier steps of the same anchor
        return (document | own)[None, None]


def score(work: Work, hidden: Tensor, ids: Tensor) -> Tensor:  # (A, n, G)
    """Return the log-probs of all generated tokens; hidden (A * n * G, D) are the predictors, in the order of ids."""
    policy = work.policy
    return linear_logprob(
        as_head_takes(policy, hidden), target=ids.flatten(), temperature=work.cfg.temperature, ignore_index=None,
        entropy=False, **head_of(policy.model),
    ).logp.view(ids.shape)  # fmt: skip


@dataclass
class Timed:
    """Optimizer step of one layout; records the seconds of its parts in every call."""

    way: SharedRow | StepMajor
    optimizer: torch.optim.Optimizer
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"generate": [], "features": [], "train": []})

    def __call__(self) -> None:
        ids = self._time("generate", self.way.generate)
        advantage = self._time("features", partial(self.way.add_rewards, ids))
        self._time("train", partial(self._train, ids, advantage))

    def _train(self, ids: Tensor, advantage: Tensor) -> None:
        self.way.train(ids, advantage)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _time(self, part: str, call: Callable[[], Any]) -> Any:
        started = clock()
        result = call()
        self.seconds[part].append(clock() - started)
        return result

    def medians(self) -> dict[str, float]:
        """Return the median seconds per part, without the first call, which compiles."""
        return {f"{part}_s": torch.tensor(taken[1:]).median().item() for part, taken in self.seconds.items()}


def clock() -> float:
    """Return the time after a sync; three syncs are negligible in a step of many passes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_work(shape: dict[str, Any], num_tokens: int, plan: dict[str, int], device: torch.device) -> Work:
    """Create weights in the trainer's dtypes: float32 if trained, the matmul dtype if frozen."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = make_policy(shape, device, torch.float32, attention="auto")
    frozen = copy.deepcopy(policy.model).to(dtype).eval().requires_grad_(False)
    policy = replace(policy, compute_dtype=dtype, reference=frozen)
    cfg = EbftConfig(
        mode="strided", model=ModelConfig(model="random"), data=DataConfig(data=("random",)), temperature=0.6,
        features=FeatureConfig(embed_method="last_token", ce_coef=0.03),
        strided=StridedConfig(**plan, max_length=num_tokens),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    document = Document(torch.randint(shape["vocab_size"], (num_tokens,), generator=generator).tolist())
    num_anchors, samples = len(cfg.strided.plan.anchors(document)), cfg.strided.n_samples_per_prompt
    seeds = torch.arange(num_anchors * samples, device=device).view(num_anchors, samples)
    return Work(cfg, policy, FeatureNetwork(cfg.features, cfg.run, policy), document, seeds)


def gradient(way: SharedRow | StepMajor, ids: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    model = way.work.policy.model
    way.train(ids, advantage)
    gradients = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def widened(work: Work) -> Work:
    """Return the same work in the next wider float."""
    dtype = WIDER[work.policy.compute_dtype]
    return replace(
        work, policy=replace(work.policy, model=copy.deepcopy(work.policy.model).to(dtype), compute_dtype=dtype)
    )


def measure(shape: dict[str, Any], num_tokens: int, plan: dict[str, int], seconds: float) -> list[Row]:
    work = make_work(shape, num_tokens, plan, pick_device())
    policy = work.policy
    ways = {SHARED: SharedRow(work), STEP_MAJOR: StepMajor(work)}
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.0, fused=policy.device.type == "cuda")
    calls = {name: Timed(way, optimizer) for name, way in ways.items()}
    timings = alternate(calls, seconds=seconds, rounds=3)
    drawn = {name: ways[name].generate() for name in timings}
    ids = drawn[SHARED]
    advantage = ways[SHARED].add_rewards(ids)
    exact = StepMajor(widened(work))
    exact_logp, exact_gradient = exact.score(ids), gradient(exact, ids, advantage)
    logps = {name: ways[name].score(ids) for name in timings}
    gradients = {name: gradient(ways[name], ids, advantage) for name in timings}
    sizes = {"S": num_tokens, "layers": shape["num_hidden_layers"], "D": shape["hidden_size"], "A": len(ids), **plan}
    rows = []
    for name, timing in timings.items():
        errors = {
            "logp": relative_error(logps[name], exact_logp),
            "gradient": distance(gradients[name], exact_gradient),
        }
        other = next((other for other in timings if other != name), name)
        extra = {
            **calls[name].medians(),
            "places": float(ways[name].num_computed),
            "logp_gap": (logps[name] - logps[other]).abs().max().item(),
            "gradient_gap": distance(gradients[name], gradients[other]),
            "same_ids_frac": (drawn[name] == drawn[other]).double().mean().item(),
        }
        rows.append(make_row(
            "ebft_step", name, timing, shape=sizes, dtype=policy.compute_dtype, work=work.num_generated, unit="tokens",
            errors=errors, against={other: timings[other]} if other != name else {}, extra=extra,
        ))  # fmt: skip
    return rows


def main(
    out: Path | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    stride: int = 8,
    context: int = 8,
    generated: int = 8,
    samples: int = 4,
    seconds: float = 3.0,
) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        layers: Depth of the model. None: 28 on a GPU, 2 elsewhere.
        tokens: Length of the document. None: 4096 on a GPU, 256 elsewhere.
        stride: Tokens from one anchor to the next.
        context: Tokens before the first anchor.
        generated: Tokens of a continuation.
        samples: Continuations of each anchor.
        seconds: Time for the loop; longer if 3 rounds take longer.
    """
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = QWEN3_0_6B if on_cuda else TINY
    shape = shape | ({} if layers is None else {"num_hidden_layers": layers})
    plan = {
        "stride": stride, "context_length": context, "generate_max_len": generated, "n_samples_per_prompt": samples,
    }  # fmt: skip
    emit(measure(shape, tokens or (4096 if on_cuda else 256), plan, seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
