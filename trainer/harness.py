"""Tasks of lm-evaluation-harness on a model of ours: python -m trainer.evaluate RUN --tasks gsm8k,arc_easy

The harness loads tasks, builds prompts and computes metrics; its Hugging Face backend scores given answers. Texts that
a task asks to generate come from our in-process engine, which is several times faster on a GPU and equal when greedy.
"""

from __future__ import annotations

import sys
from typing import Any

from data.chat import stop_ids
from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines.load import load_model
from trainer.generate import run_settings

KNOWN = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}  # what the engine can follow


def run_tasks(cfg: Any) -> dict[str, float]:
    """Metrics of each task, named TASK/METRIC, with the harness's standard errors; `cfg` is trainer.evaluate's."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("tasks: needs lm-evaluation-harness; pip install -e '.[eval]'") from None
    tasks = [name.strip() for name in cfg.tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=cfg.task_folder)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise UserError(f"tasks={unknown[0]}: no such task; `lm-eval ls tasks` lists them, --task-folder adds yours")
    run = run_settings(cfg.source)
    model, tokenizer = load_model(cfg.source, trust_remote_code=cfg.trust_remote_code)
    system_prompt = run.get("system_prompt") if cfg.system_prompt is None else cfg.system_prompt
    found = lm_eval.simple_evaluate(
        model=language_model(model, tokenizer, cfg.batch_size),
        tasks=tasks,
        num_fewshot=cfg.num_fewshot,
        limit=cfg.limit,
        task_manager=manager,
        system_instruction=system_prompt,
        apply_chat_template=system_prompt is not None or cfg.as_chat,
        log_samples=False,
    )
    return {
        f"{task}/{metric.replace(',none', '').replace(',', '/')}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float | int) and metric != "sample_len"
    }


def language_model(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """The harness's Hugging Face backend, with our engine for the texts it generates."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    from rollout.engines.local import LocalEngine

    class EngineLM(HFLM):
        engine = LocalEngine(model, tokenizer)
        ends = stop_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
            strange = {name for own in settings for name in own} - KNOWN
            if strange:
                print(f"tasks: {', '.join(sorted(strange))} is not known to our engine; transformers generates",
                      file=sys.stderr)  # fmt: skip
                return super().generate_until(requests, disable_tqdm)
            texts = [""] * len(requests)
            for key in sorted({_key(own) for own in settings}):  # requests that are sampled alike go together
                chosen = [number for number, own in enumerate(settings) if _key(own) == key]
                for number, text in zip(chosen, self._sampled(requests, chosen, settings[chosen[0]]), strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
            return texts

        def _sampled(self, requests: list[Any], chosen: list[int], own: dict[str, Any]) -> list[str]:
            eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
            until = handle_stop_sequences(list(own["until"]), eos=eos)
            room = self.max_length - own["max_gen_toks"]
            if room < 1:
                raise UserError(
                    f"tasks: asks for {own['max_gen_toks']} tokens, and the model's context is {self.max_length}"
                )
            temperature = own.get("temperature", 1.0) if own.get("do_sample") else 0.0
            sampling = Sampling(
                temperature=temperature,
                top_p=own.get("top_p", 1.0) if temperature else 1.0,
                top_k=own.get("top_k", 0) if temperature else 0,
                max_tokens=own["max_gen_toks"],
                stop_ids=self.ends,
                stop=tuple(text for text in until if text),
            )
            contexts = [self.tok_encode(requests[number].args[0], left_truncate_len=room) for number in chosen]
            asked = [Request(prompt_ids=ids, seed=number) for ids, number in zip(contexts, chosen, strict=True)]
            made = self.engine.generate(asked, sampling)
            return [postprocess_generated_text(completion.text, until, None) for completion in made]

    return EngineLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def _key(own: dict[str, Any]) -> str:
    return repr(sorted(own.items()))
