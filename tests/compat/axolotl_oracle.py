"""Run axolotl's own code on a config, without installing it: its settings and its tokenised rows.

    oracle = Oracle(Path("axolotl-0.21.0/src"))
    settings, arguments = oracle.settings(tree)     # the validated config, and the arguments of its trainer
    rows = oracle.rows(settings)                    # SFT: input_ids and labels; preferences: prompt, chosen, rejected

Packages that only train, log or fetch are replaced by stubs; trl and addict must be importable.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

STUBS = ("art", "bitsandbytes", "colorama", "evaluate", "fire", "llmcompressor", "numba", "posthog", "requests",
         "wandb")  # fmt: skip
GPU = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}
STEPS = 1000  # of the run: 3% of them are below axolotl's limit of 100 warm-up steps


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: packages that are installed are found before."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in STUBS or name.startswith("axolotl.contribs")  # not in the archive
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _Built(Exception):
    """Carries the training arguments out of the builder, which would load a model next."""


class PeerError(Exception):
    """axolotl itself does not take the file or its rows."""


def _theirs(function: Any) -> Any:
    """What axolotl raises, as a PeerError of one line."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = next((line for line in lines if "validation error" not in line), type(error).__name__)
            raise PeerError(text.partition(" [type=")[0]) from error

    return wrapped


class Oracle:
    def __init__(self, source: Path, deps: Path | None = None) -> None:
        sys.path.insert(0, str(source))
        sys.path += [str(deps)] if deps else []
        sys.meta_path.append(_Stubs())
        os.environ.update(AXOLOTL_DO_NOT_TRACK="1", TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")
        warnings.filterwarnings("ignore")
        logging.disable(logging.ERROR)
        import axolotl.core.builders as builders
        import axolotl.utils.config as config
        import datasets
        import transformers.training_args

        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()

        for module in (config, transformers.training_args):  # as on a GPU
            module.is_torch_bf16_gpu_available = lambda: True

        def stop(builder: Any, arguments: Any) -> NoReturn:
            raise _Built(arguments)

        builders.HFCausalTrainerBuilder.hook_post_create_training_args = stop
        self.builders, self.config = builders, config
        files = [*source.glob("axolotl/utils/schemas/*.py"), *source.glob("axolotl/integrations/*/args.py")]
        self.schemas = "".join(file.read_text() for file in files)

    def knows(self, key: str) -> bool:
        """Whether the schema, or a plugin's, has the key or the block that contains it."""
        return re.search(rf"^    {re.split(r'[.[]', key)[0]}: ", self.schemas, re.MULTILINE) is not None

    def default(self, key: str) -> Any:
        """The schema's default of a key at the top of a file."""
        from axolotl.utils.schemas.config import AxolotlInputConfig

        field = AxolotlInputConfig.model_fields.get(key)
        return None if field is None else field.get_default(call_default_factory=True)

    @_theirs
    def settings(self, tree: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the config as axolotl completes it and its training arguments; raise what axolotl raises."""
        import torch
        from axolotl.integrations.base import PluginManager
        from axolotl.loaders import load_tokenizer
        from axolotl.utils.dict import DictDefault

        PluginManager._instance = None
        cfg = DictDefault(copy.deepcopy(dict(tree)))
        self.config.prepare_plugins(cfg)
        cfg = self.config.validate_config(cfg, dict(GPU), {"torch_version": torch.__version__.partition("+")[0]})
        self.config.normalize_config(cfg)
        self.config.normalize_cfg_datasets(cfg)
        if cfg.wandb_project:  # as setup_wandb_env_vars does
            cfg.use_wandb = True
        cfg.tf32, cfg.deepspeed, cfg.tokenizer_type = False, None, None  # need a GPU, a package, that very tokenizer
        kind = self.builders.HFRLTrainerBuilder if cfg.rl else self.builders.HFCausalTrainerBuilder
        builder = object.__new__(kind)
        builder.cfg, builder.tokenizer = cfg, load_tokenizer(cfg)
        builder.model = builder.processor = builder._train_dataset = builder._eval_dataset = None
        steps = min(STEPS, cfg.max_steps or STEPS)
        if cfg.rl:
            return cfg, builder._build_training_arguments(steps)[0]
        try:
            builder.build(steps)
        except _Built as built:
            return cfg, built.args[0]
        raise AssertionError("axolotl's builder returned before its training arguments were made")

    @_theirs
    def rows(self, cfg: Any) -> list[dict[str, Any]]:
        """Return the rows of all datasets as axolotl prepares them, in order."""
        import datasets
        from axolotl.loaders import load_tokenizer
        from axolotl.utils.data import rl, sft

        cfg.dataset_num_proc, cfg.dataset_exact_deduplication = None, None  # one process, and before --dedup
        if cfg.rl:
            merge = mock.patch.object(rl, "merge_datasets", lambda parts, cfg: datasets.concatenate_datasets(parts))
            with merge, mock.patch.object(rl, "save_preprocessed_dataset"):
                return list(rl._load_split(cfg, "train"))
        tokenizer, configs = load_tokenizer(cfg), cfg.datasets
        if cfg.pretraining_dataset:
            configs = [sft._extract_pretraining_config(cfg)]
        parts = [
            sft._load_and_process_single_dataset(dataset, cfg, tokenizer, split="train", seed=42)[0]
            for dataset in sft.datasets_with_name_generator(configs)
        ]
        if "labels" in parts[0].column_names:
            parts = [sft.handle_long_seq_in_dataset(part, cfg.sequence_len, cfg) for part in parts]
        return [row for part in parts for row in part]
