"""Run lm-evaluation-harness tasks: python -m trainer.evaluate RUN --tasks gsm8k,arc_easy

The harness loads tasks, builds prompts and computes metrics; its Hugging Face backend scores given answers. Generated
texts come from the in-process engine, which is several times faster on a GPU and gives the same greedy texts.
"""

from __future__ import annotations

import sys
from typing import Any

from data.chat import stop_ids
from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines.load import load_model
from trainer.generate import run_settings

SUPPORTED = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}  # settings of the engine


def run_tasks(
    source: str,
    tasks: list[str],
    *,
    task_folder: str | None,
    num_fewshot: int | None,
    limit: int | None,
    system_prompt: str | None,
    as_chat: bool,
    batch_size: int,
    trust_remote_code: bool,
) -> dict[str, float]:
    """Return the metrics of each task as TASK/METRIC, including the harness's standard errors."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("--tasks needs lm-evaluation-harness; pip install -e '.[eval]'") from None
    manager = TaskManager(include_path=task_folder)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise UserError(
            f"tasks={unknown[0]}: unknown task; `lm-eval ls tasks` lists them, --task-folder adds custom tasks"
        )
    model, tokenizer = load_model(source, trust_remote_code=trust_remote_code)
    system_prompt = run_settings(source).get("system_prompt") if system_prompt is None else system_prompt
    evaluation = lm_eval.simple_evaluate(
        model=language_model(model, tokenizer, batch_size),
        tasks=tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        system_instruction=system_prompt,
        apply_chat_template=system_prompt is not None or as_chat,
        log_samples=False,
    )
    return {
        f"{task}/{metric.replace(',none', '').replace(',', '/')}": value
        for task, metrics in evaluation["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float | int) and metric != "sample_len"
    }


def language_model(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """Build the harness's Hugging Face backend, with the in-process engine for generated texts."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    from rollout.engines.local import LocalEngine

    class EngineLM(HFLM):
        engine = LocalEngine(model, tokenizer)
        ends = stop_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
            if unsupported := {name for kwargs in settings for name in kwargs} - SUPPORTED:
                names = ", ".join(sorted(unsupported))
                print(f"tasks: the engine does not support {names}; generating with transformers", file=sys.stderr)
                return super().generate_until(requests, disable_tqdm)
            texts = [""] * len(requests)
            keys = [repr(sorted(kwargs.items())) for kwargs in settings]
            for key in sorted(set(keys)):  # one batch per sampling setting
                batch = [i for i in range(len(requests)) if keys[i] == key]
                for i, text in zip(batch, self._sample(requests, batch, settings[batch[0]]), strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
            return texts

        def _sample(self, requests: list[Any], batch: list[int], kwargs: dict[str, Any]) -> list[str]:
            eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
            until = handle_stop_sequences(list(kwargs["until"]), eos=eos)
            room = self.max_length - kwargs["max_gen_toks"]
            if room < 1:
                tokens = kwargs["max_gen_toks"]
                raise UserError(f"--tasks: max_gen_toks={tokens} does not fit the model's context of {self.max_length}")
            temperature = kwargs.get("temperature", 1.0) if kwargs.get("do_sample") else 0.0
            sampling = Sampling(
                temperature=temperature,
                top_p=kwargs.get("top_p", 1.0) if temperature else 1.0,
                top_k=kwargs.get("top_k", 0) if temperature else 0,
                max_tokens=kwargs["max_gen_toks"],
                stop_ids=self.ends,
                stop=tuple(text for text in until if text),
            )
            contexts = [self.tok_encode(requests[i].args[0], left_truncate_len=room) for i in batch]
            prompts = [Request(prompt_ids=ids, seed=i) for ids, i in zip(contexts, batch, strict=True)]
            completions = self.engine.generate(prompts, sampling)
            return [postprocess_generated_text(completion.text, until, None) for completion in completions]

    return EngineLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
