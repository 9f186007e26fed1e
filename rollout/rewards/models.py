"""Rewards from trained models: an outcome model scores whole answers, a process model scores each step.

    model:PATH               score of prompt and completion, from a sequence-classification model with one output
    prm:PATH[,min|mean|last] probability that the steps are right, from a token-classification model with two outputs;
                             default: min, the worst step

PATH is a finished run of --method rm or prm, a model folder or a hub id. The reward model's tokenizer encodes the text
as in training; models trained by strop store the settings for this under "strop" in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.chat import apply_template, end_of_turn_id, render_prompt, render_text, stop_ids, with_system
from data.errors import UserError
from data.hub import check_hub
from data.types import Messages
from rollout.rewards.functions import text_of

MAX_TOKENS = 16384  # per forward pass, padding included
COMBINE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda rights: sum(rights) / len(rights),
    "last": lambda rights: rights[-1],
}


class OutcomeReward:
    """model:PATH."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self.model, self.tokenizer = load_model(
            f"model:{path}", path, "SequenceClassification", num_labels=1, trust_remote_code=trust_remote_code
        )
        self.training = getattr(self.model.config, "strop", None)  # settings; None if not trained by strop

    def __call__(self, completions: Sequence[Any], prompts: Sequence[str | Messages]) -> list[float]:
        rows = [self.ids(prompt, text_of(text)) for prompt, text in zip(prompts, completions, strict=True)]
        return [float(logits[0]) for logits in forward(self.model, rows)]

    def ids(self, prompt: str | Messages, text: str) -> list[int]:
        """Render like the response of a training pair: up to and including the end of the turn."""
        if isinstance(prompt, str):
            ids, eos = render_prompt(self.tokenizer, prompt + text), self.tokenizer.eos_token_id
            return ids if eos is None or ids[-1] in stop_ids(self.tokenizer) else [*ids, eos]
        training = self.training or {}
        messages = with_system(prompt, training.get("system_prompt"))
        answer = {"role": "assistant", "content": text}
        conversation = apply_template(self.tokenizer, [*messages, answer], **training.get("chat_template_kwargs", {}))
        ids = render_text(self.tokenizer, conversation)
        end = end_of_turn_id(self.tokenizer)
        if self.training is None or end not in ids:  # other models also read what their template puts after the turn
            return ids
        return ids[: len(ids) - ids[::-1].index(end)]


class ProcessReward:
    """prm:PATH and prm:PATH,min."""

    def __init__(self, argument: str, trust_remote_code: bool = False) -> None:
        path, comma, how = argument.rpartition(",")
        if comma and how not in COMBINE:
            raise UserError(f"reward_funcs=prm:{argument}: {how!r} cannot combine steps; use min, mean or last")
        self.combine = COMBINE[how if comma else "min"]
        path = path if comma else argument
        self.model, self.tokenizer = load_model(
            f"prm:{argument}", path, "TokenClassification", num_labels=2, trust_remote_code=trust_remote_code
        )
        training = getattr(self.model.config, "strop", None) or {}
        self.separator = training.get("step_separator", "\n")
        self.system_prompt = training.get("system_prompt")
        self.kwargs = training.get("chat_template_kwargs", {})

    def __call__(self, completions: Sequence[Any], prompts: Sequence[str | Messages]) -> list[float]:
        rows = [self.ids(prompt, text_of(text)) for prompt, text in zip(prompts, completions, strict=True)]
        logits = forward(self.model, [ids for ids, _ in rows])
        return [self.score(logits[i], ends) for i, (_, ends) in enumerate(rows)]

    def ids(self, prompt: str | Messages, text: str) -> tuple[list[int], list[int]]:
        """Return (ids, end of each step). Each step is encoded alone and followed by the separator, as in training."""
        ids = render_prompt(self.tokenizer, prompt, self.system_prompt, self.kwargs)
        separator = render_text(self.tokenizer, self.separator)
        ends = []
        for step in text.split(self.separator):
            if step.strip():
                ids = [*ids, *render_text(self.tokenizer, step), *separator]
                ends.append(len(ids) - 1)
        return ids, ends

    def score(self, logits: Any, ends: list[int]) -> float:
        if not ends:
            return 0.0  # an empty answer is wrong; with None a policy could avoid being scored
        return self.combine(logits[ends].float().softmax(dim=-1)[:, 1].tolist())


MODELS = {"model": OutcomeReward, "prm": ProcessReward}


def load_reward_model(kind: str, argument: str | None, trust_remote_code: bool) -> OutcomeReward | ProcessReward:
    if not argument:
        method = {"model": "rm", "prm": "prm"}[kind]
        raise UserError(f"reward_funcs={kind}: no path; write {kind}:PATH, e.g. a finished run of --method {method}")
    return MODELS[kind](argument, trust_remote_code)


def load_model(spec: str, path: str, task: str, *, num_labels: int, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a transformers classification model in evaluation mode, and its tokenizer."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from rollout.model_folder import check_base, trust_hint

    label = f"reward_funcs={spec}"
    source = _resolve(label, path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32
    try:
        check_base(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        kinds = config.architectures or []
        if kinds and not any(kind.endswith(task) for kind in kinds):
            other = {"SequenceClassification": "prm", "TokenClassification": "model"}[task]
            hint = f"; did you mean {other}:{path}?" if "Classification" in kinds[0] else ""
            raise UserError(f"{kinds[0]} has no {task} head{hint}")
        if config.num_labels != num_labels:
            raise UserError(f"the head has {config.num_labels} outputs, not {num_labels}")
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        auto = getattr(transformers, f"AutoModelFor{task}")
        model, info = auto.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never load a .bin file, which is a pickle
        )
    except Exception as error:  # transformers may raise anything for damaged files
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{label}: cannot be used as a reward model ({reason}){trust_hint(error)}") from None
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        raise UserError(f"{label}: weights lack {missing}, which would be random; train it with --method rm or prm")
    return model.to(device).eval(), tokenizer


def _resolve(label: str, path: str) -> str:
    """Return the final/ of a run folder, a model folder, or a hub id if there is no such folder."""
    folder = Path(path).expanduser()
    if (folder / "final").is_dir():
        folder = folder / "final"
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{label}: an adapter of a language model, not a reward model; train one with --method rm")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{label}: neither a model (no config.json) nor a finished run (no final/); check the path")
    if not folder.is_dir():
        check_hub("model", path, label)
    return str(folder) if folder.is_dir() else path


def forward(model: Any, rows: Sequence[list[int]]) -> list[Any]:
    """Return each row's logits from the model's forward, in order: (labels,) or (tokens of the row, labels)."""
    import torch

    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max(map(len, rows), default=0) > limit:
        raise UserError(f"a row of {max(map(len, rows))} tokens exceeds the reward model's context of {limit}")
    logits: list[Any] = [None] * len(rows)
    for members in _batches([len(ids) for ids in rows], alone=config.pad_token_id is None):
        width = max(len(rows[i]) for i in members)
        input_ids = torch.full((len(members), width), config.pad_token_id or 0)
        mask = torch.zeros_like(input_ids)
        for j, i in enumerate(members):
            input_ids[j, : len(rows[i])] = torch.tensor(rows[i])
            mask[j, : len(rows[i])] = 1
        with torch.inference_mode():
            output = model(input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device)).logits.cpu()
        for j, i in enumerate(members):
            logits[i] = output[j]
    return logits


def _batches(lengths: list[int], *, alone: bool) -> list[list[int]]:
    """Batch rows of similar length, to limit padding. `alone`: one row per batch, if there is no padding token."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and not alone and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= MAX_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
