"""Run every example config of axolotl here, and compare what it means there.

    python -m tests.compat.axolotl axolotl-0.21.0.tar.gz [--deps DEPS] [--train] [--only PATTERN] [--jobs N]

Each YAML file in the archive's examples/ is rejected by name, or accepted and compared with axolotl's own code
(axolotl_oracle.py; unpacked, not installed): every key, the arguments of its trainer, and the token ids and masks of
its rows. Only models and data are replaced, by a tiny model and small rows; so are those of axolotl_probes.yaml, small
configs for what no example contains. --train also trains every accepted file for two steps.
DEPS has packages that axolotl imports: pip install --no-deps --target DEPS trl==1.16.0 addict
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import re
import sys
import tarfile
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.compat import axolotl_compare as compare
from tests.compat.axolotl_inputs import localised
from tests.compat.axolotl_oracle import Oracle, PeerError
from tests.entry import run

DOCS = Path(__file__).parents[2] / "docs" / "from_axolotl.md"
PROBES = Path(__file__).with_name("axolotl_probes.yaml")
PROBE = "probe: "
REWARDS = Path(__file__).parents[1] / "trainer" / "translate" / "examples" / "rwd.py"
# What only a GPU machine has: the file's own value is translated and compared, and overridden to train here.
HERE = {"report_to": ["none"], "optim": ["adamw"], "compile": ["False"], "dtype": ["float32"],
        "lora.modules_to_save": []}  # fmt: skip
# Keys without effect here for which axolotl's code was read: whatever their value, they do not change what is trained.
NO_EFFECT = set(
    """
    activation_offloading auto_find_batch_size autotune_cache_path autotune_neighborhood autotune_profiles
    batch_flattening cls_model_config cut_cross_entropy dataloader_num_workers dataset_num_proc dataset_prepared_path
    dataset_processes ddp ddp_find_unused_parameters ddp_timeout debug deepspeed default_system_message device_map
    dp_replicate_size eval_batch_size eval_max_new_tokens eval_on_start eval_sample_packing eval_table_size
    experimental_skip_move_to_device experts_implementation flash_attn_cross_entropy flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum fsdp fsdp_version fused_attn_kernel gemma4_hybrid_attn_impl gpu_memory_limit
    group_by_length hf_use_auth_token hub_model_id liger_fused_linear_cross_entropy liger_glu_activation
    liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope llama4_linearized_experts lora_fan_in_fan_out
    lora_mlp_kernel lora_o_kernel lora_qkv_kernel low_cpu_mem_usage max_prompt_len model_type num_labels
    otel_metrics_host otel_metrics_port pad_to_sequence_len plugins ray_num_workers
    remove_unused_columns sample_packing_sequentially save_only_model save_safetensors streaming
    streaming_multipack_buffer_size strict tf32 tiled_mlp tokenizer_type tokenizer_use_fast
    torch_compile_mode trl.generation_kwargs.stop_token_ids trl.log_completions trl.num_completions_to_print
    trl.use_data_producer use_kernels use_otel_metrics use_ray use_scattermoe use_sonicmoe use_swanlab wandb_name
""".split()
)
NO_EFFECT_BLOCKS = ("accelerator_config.", "autotune_profiles", "bnb_config_kwargs.", "device_map.", "fsdp_config.",
                    "flex_attn_compile_kwargs.", "gradient_checkpointing_kwargs.", "swanlab_", "vllm.")  # fmt: skip
# Keys that a method may not use: their effect there is compared.
COMPARED = ("cosine_min_lr_ratio", "lora_dropout", "rl_beta", "orpo_alpha", "sequence_len", "trl.beta")


@dataclass
class Result:
    name: str
    outcome: str = "run"  # or: not training, rejected, traceback
    reason: str = ""
    peer: str = ""  # why axolotl itself does not take the file
    keys: dict[str, str] = field(default_factory=dict)  # key -> what happens to it here
    silent: list[str] = field(default_factory=list)
    documented: Counter[str] = field(default_factory=Counter)  # name of an intended difference -> times


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.axolotl")
    parser.add_argument("archive", type=Path, help="axolotl's source archive, or the folder unpacked from it")
    parser.add_argument("--deps", type=Path, help="folder with packages that axolotl imports")
    parser.add_argument("--train", action="store_true", help="train every accepted file for two steps")
    parser.add_argument("--only", default="*", help="pattern of file names below examples/")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train")
    given = parser.parse_args(argv)
    archive, deps = given.archive.absolute(), given.deps and given.deps.absolute()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        work = Path(scratch)
        folder = archive if archive.is_dir() else unpack(archive, work)
        configs = {PROBE + name: tree for name, tree in yaml.safe_load(PROBES.read_text())["probes"].items()}
        for file in sorted((folder / "examples").rglob("*.y*ml")):
            configs[str(file.relative_to(folder / "examples"))] = yaml.safe_load(file.read_text())
        configs = {name: tree for name, tree in configs.items() if fnmatch.fnmatch(name, f"*{given.only}*")}
        (work / "deepspeed_configs").symlink_to(folder / "deepspeed_configs")
        oracle = Oracle(folder / "src", deps)
        results = []
        for number, (name, tree) in enumerate(configs.items()):
            (work / str(number)).mkdir()
            results.append(check(name, tree, work / str(number), oracle))
            print(f"\r{number + 1} of {len(configs)}", end="", file=sys.stderr)
        if given.train:
            accepted = [number for number, result in enumerate(results) if result.outcome == "run"]
            with ProcessPoolExecutor(given.jobs) as pool:
                folders = [work / str(number) for number in accepted]
                for number, (outcome, reason) in zip(accepted, pool.map(train, folders), strict=True):
                    results[number].outcome, results[number].reason = outcome, reason
                    print(f"\rtrained {results[number].name}: {outcome}\033[K", end="", file=sys.stderr)
    print(file=sys.stderr)
    return report(results, trained=given.train)


def unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(work / "axolotl", filter="data")
    return next((work / "axolotl").iterdir())


def check(name: str, tree: Any, folder: Path, oracle: Oracle) -> Result:
    """Classify a file and, if it is accepted, compare it."""
    from data.command.flags import config_to_tree
    from data.errors import UserError
    from trainer.cli import parse
    from trainer.translate.axolotl import is_axolotl

    result = Result(name)
    if not isinstance(tree, Mapping) or "base_model" not in tree or not is_axolotl(tree):
        result.outcome, result.reason = "not training", "no base_model: settings of a cloud service"
        return result
    made = localised(tree, folder)
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(made))
    console = io.StringIO()
    try:
        with contextlib.redirect_stderr(console):
            _, cfg, method = parse(["--config", str(file)])
        result.keys = keys_of(made, console.getvalue(), result, oracle)
        theirs, args = oracle.settings(made)
        for key, (there, here) in compare.settings(theirs, args, config_to_tree(cfg), method).items():
            kind = compare.setting_kind(key, there, here)
            note(result, kind, f"{key}: there {there!r}, here {here!r}", console.getvalue())
        for kind in compare.always(theirs):
            note(result, kind, kind, console.getvalue())
        for kind, difference in compare.rows(oracle, theirs, cfg, method, made):
            note(result, kind, difference, console.getvalue())
    except UserError as error:
        result.outcome, result.reason = "rejected", str(error).removeprefix(f"{file}: ").replace(f"{folder}/", "")
        result.silent = [] if "\n" not in result.reason else ["rejected in several lines"]
    except PeerError as error:
        result.peer = str(error)
    except Exception:
        result.outcome, result.reason = "traceback", traceback.format_exc(limit=-3)
    return result


def note(result: Result, kind: str, difference: str, console: str) -> None:
    """Count a difference that is documented, and on the console if it must be; any other is silent."""
    paragraph, word = compare.DOCUMENTED.get(kind, ("", ""))
    if paragraph and word in console and f"**{paragraph}" in DOCS.read_text():
        result.documented[kind] += 1
    else:
        missing = f" ({kind}: not in {DOCS.name}, or {word} not on the console)" if kind else ""
        result.silent.append(difference + missing)


def keys_of(tree: Mapping[str, Any], console: str, result: Result, oracle: Oracle) -> dict[str, str]:
    """What happens to each key of the file here; keys without effect must be on the console, and have none there."""
    from trainer.translate.axolotl import translate
    from trainer.translate.axolotl_table import TABLE
    from trainer.translate.keys import EMPTY, find, leaves

    idle = {key: reason for reason, keys in translate(tree).idle.items() for key in keys}
    found = {}
    for key, value in leaves(tree, TABLE):
        entry = find(key, TABLE)
        if value is None or entry is None:
            continue
        found[key] = idle.get(key) or entry.outcome
        if key in idle and key not in console:
            result.silent.append(f"{key}={value}: has no effect here, and the console does not say so")
        unused = idle.get(key, "").startswith("not used by") and key in COMPARED
        if unused or key in NO_EFFECT or key.startswith(NO_EFFECT_BLOCKS) or value == oracle.default(key):
            continue
        if key in idle and oracle.knows(key):
            result.silent.append(f"{key}={value}: has no effect here ({idle[key]}), but has one there")
        elif entry.outcome != "translated" and value in EMPTY and oracle.default(key) not in EMPTY:
            result.silent.append(f"{key}={value}: is ignored here; axolotl's default is {oracle.default(key)}")
    return found


def train(folder: Path) -> tuple[str, str]:
    """Train a config for two steps: run, rejected or traceback, and its last line."""
    tree = yaml.safe_load((folder / "config.yml").read_text())
    (folder / REWARDS.name).symlink_to(REWARDS)
    words = []
    for key, values in HERE.items():
        words += [f"--{key.replace('_', '-')}", *values] if key != "lora.modules_to_save" or tree.get("adapter") else []
    if tree.get("rl") in ("grpo", "gdpo", "ebft"):
        words += ["--rollout.engine", "local"] if (tree.get("ebft") or {}).get("mode") != "strided" else []
    done = run("--config", "config.yml", *words, "--max-steps", 2, "--output-dir", "out", cwd=folder)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == 0:
        return "run", ""
    outcome = "traceback" if "Traceback" in done.stderr else "rejected"
    return outcome, lines[-1].removeprefix("error: ") if lines else f"exit {done.returncode}"


def report(results: list[Result], *, trained: bool) -> int:
    """Print what was found; the exit code is 1 after a traceback or a silent difference."""
    rejected: dict[str, list[Result]] = defaultdict(list)
    silent: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.outcome == "rejected":
            rejected[re.sub(r"\[\d+\]", "[]", re.split(r"[=:]", result.reason)[0])].append(result)
        if result.outcome == "traceback":
            print(f"traceback: {result.name}\n{result.reason}")
        for difference in result.silent:
            kind = re.split(r"[=:]", re.sub(r"\brow \d+", "row", difference))[0]
            silent[result.name if result.name.startswith(PROBE) else kind].append(f"{difference} ({result.name})")
    for key, group in sorted(rejected.items(), key=lambda item: -len(item[1])):
        print(f"rejected {len(group):3}: {key:36} {group[0].reason[:110]} ({group[0].name})")
    for reason, count in Counter(result.peer for result in results if result.peer).most_common():
        print(f"axolotl itself fails {count:3}: {reason[:150]}")
    for differences in silent.values():
        print(f"silent {len(differences):3}: {differences[0]}")
    probes = [result for result in results if result.name.startswith(PROBE)]
    files = [result for result in results if result not in probes]
    for title, part in filter(lambda item: item[1], (("files", files), ("probes", probes))):
        outcomes = Counter(result.outcome for result in part)
        lines = {
            "not training (cloud services)": outcomes["not training"],
            "trained two steps" if trained else "accepted": outcomes["run"],
            "of these, axolotl itself fails": sum(bool(result.peer) for result in part),
            "rejected in one line": outcomes["rejected"],
            "traceback": outcomes["traceback"],
            "silent difference": sum(bool(result.silent) for result in part),
            "keys that the accepted ones set": len({key for result in part for key in result.keys}),
        }
        print(f"\n{title:40} {len(part):4}", *(f"  {name:38} {count:4}" for name, count in lines.items()), sep="\n")
        for kind, count in Counter(kind for result in part for kind in result.documented).most_common():
            print(f"  documented: {kind:26} {count:4}")
    return int(any(result.silent or result.outcome == "traceback" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
