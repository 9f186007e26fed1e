"""Outcome for each key of another library: translated, no effect here, or rejected. Shared by axolotl and TRL.

    TABLE = {"rl_beta": to("beta"), "tf32": idle(SPEED), "deepspeed": rejected("not supported; use ...")}
    theirs = Theirs(tree, TABLE, "axolotl")     # raises an error that names all unknown and rejected keys
    beta = theirs.take("rl_beta")               # None if it is absent or null
    theirs.idle("dpo")                          # reason -> keys of the file without effect

A key inside a block is joined by dots (trl.beta), one inside a list of blocks by [] (datasets[].path). A name that ends
with .* matches everything below it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from data.errors import UserError
from data.hints import KEYS, nearest

Outcome = Literal["translated", "no effect", "rejected"]
EIGHT_BITS = "a bfloat16 base, with a note"
EIGHT_BITS_NOTE = "load_in_8bit: the base stays in bfloat16, which takes twice the memory and is more precise"
FULL = "completions would come from a distribution whose log-probs the loss cannot compute"
SCHEDULES = {"constant_with_warmup": "constant", "cosine_warmup_with_min_lr": "cosine_with_min_lr",
             **{name: name for name in ("constant", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay",
                                        "inverse_sqrt")}}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla",
                     "paged_adamw_32bit", "optimi_adamw", "adamw_anyprecision"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "ao_adamw_8bit", "adamw_torch_8bit"),
                    "adamw_8bit"),
    "muon": "muon",
}  # fmt: skip
KERNELS = ("sdpa", "eager")  # of attn_implementation; any other: auto
LOCAL_HOSTS = ("0.0.0.0", "localhost", "127.0.0.1", "::1", "::")
FILTERS = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # values that keep all tokens
UNRESTRICTED = {**FILTERS, "repetition_penalty": (1,)}  # the full distribution
# Fields of TRL's use_adaptive_entropy: our flag, and TRL's default.
ADAPTIVE = {"entropy_target": ("entropy_target", 0.2), "entropy_coef_delta": ("entropy_coef_step", 0.005),
            "entropy_coef_max": ("entropy_coef_max", 1.0)}  # fmt: skip
SERVICES = ("wandb", "tensorboard", "trackio")
BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
# Metrics of an evaluation. The held-out loss: HELD_OUT_LOSS of the method, or eval/loss.
METRICS = {"reward": "eval/reward/mean", "rewards/margins": "eval/reward/margin", "accuracy": "eval/reward/accuracy",
           "rewards/accuracies": "eval/reward/accuracy", "rewards/chosen": "eval/reward/chosen"}  # fmt: skip
HELD_OUT_LOSS = {**dict.fromkeys(("sft", "ebft"), "eval/nll"),
                 **dict.fromkeys(("grpo", "rloo", "online_dpo", "ppo"), "eval/reward/mean")}  # fmt: skip
EMPTY = (None, False, "", [], {})  # values for which a rejected or idle key has no effect


class Why:
    """Reasons why a key has no effect; the console groups keys by reason."""

    QUANTISED = "settings of a 4-bit base are fixed"
    SPEED = "affects only speed or memory"
    ROWS = "preparation and caching of rows"
    LOGS = "logging that strop does not have"
    PROCESSES = "processes and devices, set by torchrun"
    INSIDE = "fixed in strop"
    HUB = "upload the run with trainer.push"
    SAMPLES = "samples.jsonl and report.html contain them"


class Key(NamedTuple):
    outcome: Outcome
    text: str  # strop's setting, the reason for no effect, or the reason for rejection and what to do


@dataclass
class Translation:
    """A translated config."""

    tree: dict[str, Any] = field(default_factory=dict)  # as --config reads it
    idle: dict[str, list[str]] = field(default_factory=dict)  # reason -> keys of the file without effect
    notes: list[str] = field(default_factory=list)  # differences of translated keys
    environment: dict[str, str] = field(default_factory=dict)  # variables that a service reads

    def set(self, name: str, value: Any) -> None:
        """Set a key, such as lora.r, unless the value is None."""
        if value is None:
            return
        block, dot, last = name.rpartition(".")
        target = self.tree.setdefault(block, {}) if dot else self.tree
        target[last] = value

    def note(self, text: str) -> None:
        if text not in self.notes:  # two datasets may have the same note
            self.notes.append(text)

    def remarks(self) -> list[str]:
        """Return lines for the console: the notes, and one line of keys without effect."""
        listed = [f"{', '.join(keys)} ({reason})" for reason, keys in self.idle.items()]
        return [*self.notes, *([f"no effect here: {'; '.join(listed)}"] if listed else [])]


def to(text: str) -> Key:
    return Key("translated", text)


def idle(reason: str) -> Key:
    return Key("no effect", reason)


def rejected(text: str) -> Key:
    return Key("rejected", text)


def each(keys: str, entry: Key, prefix: str = "") -> dict[str, Key]:
    return {prefix + key: entry for key in keys.split()}


SAME = to("the flag of that name")
BLOCK = to("its keys")


class Theirs:
    """A config of another library. Unknown keys raise; rejected keys raise too, or are listed in `rejections`."""

    def __init__(
        self, tree: Mapping[str, Any], table: Mapping[str, Key], library: str, *, strict: bool = True,
        unchanged: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.tree, self.table = tree, table
        self.unchanged = unchanged  # values that are not worth listing; other keys: EMPTY
        self.taken: set[str] = set()
        self.leaves = [(key, value) for key, value in leaves(tree, table) if value is not None]
        self.rejections = self._check(library)
        if strict and self.rejections:
            raise UserError("; ".join(self.rejections))

    def _check(self, library: str) -> list[str]:
        unknown: list[str] = []
        wrong: dict[str, None] = {}
        for key, value in self.leaves:
            entry = find(key, self.table)
            if entry is None:
                found = nearest_key(key, self.table)
                unknown.append(f"{key}: not a key of {library}" + (f", did you mean {found}?" if found else ""))
            elif entry is BLOCK and value not in EMPTY:
                is_list = any(name.startswith(f"{key}[].") for name in self.table)
                what = "a list of blocks; write - path: ..." if is_list else "a block of keys"
                unknown.append(f"{key}={shown(value)}: must be {what}")
            elif entry.outcome == "rejected" and value not in EMPTY:
                wrong[f"{key}={shown(value)}: {entry.text}"] = None
        if unknown:
            raise UserError("; ".join([*unknown, *wrong]))
        return list(wrong)

    def take(self, key: str) -> Any:
        """Return the value at a dotted key, or None; the key counts as translated."""
        assert find(key, self.table) is not None, key
        self.taken.add(key)
        value: Any = self.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, kind: type[int] | type[float] = float) -> Any:
        """Take a number, which YAML may have read as text (1e-6)."""
        return number(self.take(key), key, kind)

    def take_all(self, prefix: str) -> None:
        """Count everything below as translated."""
        self.taken.add(prefix)

    def idle(self, method: str) -> dict[str, list[str]]:
        """Return reason -> keys of the file that have no effect here or with this method."""
        found: dict[str, list[str]] = {}
        for key, value in self.leaves:
            entry = find(key, self.table)
            assert entry is not None, key
            if value in self.unchanged.get(key, EMPTY) or entry.outcome == "rejected":
                continue
            if entry.outcome == "no effect":
                reason = entry.text
            elif self._is_taken(key):
                continue
            else:
                reason = f"not used by {method}"
            if key not in found.setdefault(reason, []):
                found[reason].append(key)
        return found

    def _is_taken(self, key: str) -> bool:
        return any(key == taken or key.startswith((f"{taken}.", f"{taken}[].")) for taken in self.taken)


def leaves(tree: Mapping[str, Any], table: Mapping[str, Key], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with its value; a block is entered unless the table lists it as a whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not (key in table and f"{key}.*" not in table):
            yield from leaves(value, table, f"{key}.")
        elif isinstance(value, list) and value and key not in table and all(isinstance(x, Mapping) for x in value):
            for item in value:
                yield from leaves(item, table, f"{key}[].")
        else:
            yield key, value


def find(key: str, table: Mapping[str, Key]) -> Key | None:
    if key in table:
        return table[key]
    if any(name.startswith((f"{key}.", f"{key}[].")) for name in table):  # a block that is empty, or a wrong value
        return BLOCK
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        block = ".".join(parts[:length])
        if f"{block}.*" in table:
            return table[f"{block}.*"]
    return None


def nearest_key(word: str, table: Mapping[str, Key]) -> str | None:
    """Return the key that was most likely meant; a key of a third library is found by its meaning in strop."""
    ours = KEYS.get(word.replace("-", "_").lower(), ())
    same = [key for key, entry in table.items() if key in ours or entry in [to(name) for name in ours]]
    if same:
        return max(same, key=lambda key: difflib.SequenceMatcher(None, word, key).ratio())
    return nearest(word, [name for name in table if not name.endswith(".*")])


def set_adaptive_entropy(made: Translation, take: Callable[[str], Any]) -> str | None:
    """Translate TRL's use_adaptive_entropy; return a sentence if the weight has a minimum: not supported."""
    for name, (ours, default) in ADAPTIVE.items():
        given = number(take(name), name)
        made.set(ours, default if given is None else given)
    lowest = take("entropy_coef_min")
    return f"entropy_coef_min={lowest}: not supported; the weight can fall to 0" if lowest else None


def set_best(
    made: Translation, take: Callable[[str], Any], *, held_out: bool, patience: int | None = None
) -> str | None:
    """Translate which weights are exported, and early stopping; return what has no equivalent."""
    keeps, metric, greater = (take(name) for name in BEST)
    if not keeps and patience is None:
        return None
    if not held_out:
        made.note("load_best_model_at_end and early stopping: ignored, because there are no held-out rows")
        return None
    name, method = str(metric or "loss").removeprefix("eval_"), made.tree["method"]
    ours = name if name.startswith("eval/") else METRICS.get(name)
    if name == "loss":
        ours = HELD_OUT_LOSS.get(method, "eval/loss")
        if ours == "eval/reward/mean":
            made.note(f"metric_for_best_model=loss: --method {method} has no held-out loss; {ours} is used")
            greater = None
    elif name.startswith("rewards/") and name.endswith("/mean"):  # one reward function
        ours = f"eval/{name.removeprefix('rewards/')}"
    if ours is None:
        return f"metric_for_best_model={metric}: not a metric of strop; use a name from metrics.jsonl (eval/...)"
    for key, value in (("load_best_model_at_end", keeps or None), ("metric_for_best_model", ours),
                       ("greater_is_better", greater), ("early_stopping_patience", patience)):  # fmt: skip
        made.set(key, value)
    return None


def set_cispo_cap(made: Translation) -> None:
    """Translate TRL's epsilon_high for CISPO, which defaults to epsilon; epsilon alone is not used."""
    tree = made.tree
    if tree.get("loss_type") != "cispo":
        return
    epsilon = tree.pop("epsilon", None)
    if "epsilon_high" in tree:
        tree["loss_kwargs"] = {"cispo_cap": tree.pop("epsilon_high")}
    else:
        made.notes.append(
            f"loss_type=cispo: without epsilon_high TRL's bound is epsilon, {0.2 if epsilon is None else epsilon:g}, "
            "which is about every token's weight; strop's bound, loss_kwargs.cispo_cap, is 5"
        )


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(value: Any, key: str, kind: type[int] | type[float] = float) -> Any:
    """Convert a value; None stays None."""
    if value is None:
        return None
    try:
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{key}={shown(value)}: is not {what}") from None
