from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Literal, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.command import flags
from data.command.config_file import load_config, save_config
from data.command.flags import Flag, config_to_tree, flag_table
from data.errors import UserError
from tests.entry import run as run_copy
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import DataConfig, LoraConfig, ModelConfig, OptimConfig, RunConfig
from trainer.run.export import ExportConfig

ROOT = Path(__file__).resolve().parents[2]

FORK = '''
"""A method outside the repository."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.config.blocks import DataConfig, Flat, LoraConfig, ModelConfig, OptimConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """A fork that prints what it was given."""

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    lora: LoraConfig = field(default_factory=LoraConfig)
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=0.5))
    gamma: float = 1.0
    """Discount."""
    stop: tuple[str, ...] = ("</s>",)
    """Texts that end a completion."""
    weights: tuple[float, ...] | None = None
    """One weight per reward."""
    shape: tuple[int, int] = (2, 3)
    """Two sizes."""

    def __post_init__(self) -> None:
        if self.gamma > 9:
            raise ValueError(f"gamma={self.gamma}: above 9; lower it")


def train(cfg: Config) -> None:
    if cfg.gamma == 4.0:
        int("four")
    if cfg.gamma == 5.0:
        raise ValueError("gamma=5.0: refused by the loop; use another")
    if cfg.gamma == 6.0:
        raise KeyboardInterrupt
    if cfg.gamma == 7.0:
        import json

        json.loads("{")
    print("method", cfg.run.method, "model", cfg.model.model, "data", *cfg.data.data)
'''


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A working directory that holds the package my_pkg with the method my_pkg.algo."""
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").touch()
    (tmp_path / "my_pkg" / "algo.py").write_text(FORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_pkg", "my_pkg.algo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


BASE = ["--method", "my_pkg.algo", "--model", "m", "--data", "d"]


def parse(*argv: str):
    return cli.parse(list(argv))[1]


def refusal(*argv: str) -> str:
    """The mistakes, one per line."""
    with pytest.raises(UserError) as error:
        cli.parse(list(argv))
    return str(error.value)


def run(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-m", "trainer", *argv], cwd=cwd, env=env, capture_output=True, text=True)


def test_method_may_stand_anywhere(fork):
    rest = ["--model", "m", "--data", "d", "--gamma", "2"]
    expected = parse("--method", "my_pkg.algo", *rest)
    assert expected.gamma == 2.0 and expected.run.method == "my_pkg.algo"
    assert parse(*rest, "--method", "my_pkg.algo") == expected
    assert parse(*rest[:2], "--method=my_pkg.algo", *rest[2:]) == expected


def test_parse_returns_module_config_and_name(fork):
    module, cfg, name = cli.parse(BASE)
    assert (module.__name__, name, type(cfg)) == ("my_pkg.algo", "my_pkg.algo", module.Config)
    assert cfg.optim.learning_rate == 0.5  # the method's own default of a shared block
    assert cfg.lora == LoraConfig()


def value_of(cfg, path: str):
    for part in path.split("."):
        cfg = getattr(cfg, part)
    return cfg


def test_flag_reaches_its_field(fork):
    for argv, field, value in (
        (["--data", "b"], "data.data", ("d", "b")),
        (["--data", "b", "c", "--data", "e"], "data.data", ("d", "b", "c", "e")),
        (["--eval-data", "x", "--eval_data=y"], "data.eval_data", ("x", "y")),
        (["--seed", "1", "--seed", "2"], "run.seed", 2),
        (["--stop", "a", "b", "--stop", "c"], "stop", ("c",)),
        (["--stop"], "stop", ()),
        (["--stop=-x"], "stop", ("-x",)),
        (["--no-packing"], "run.packing", False),
        (["--packing", "false"], "run.packing", False),
        (["--no-packing", "--packing"], "run.packing", True),
        (["--max-steps", "7", "--max-steps", "None"], "run.max_steps", None),
        (["--gamma", "-1.5"], "gamma", -1.5),
        (["--gamma", "-1e-3"], "gamma", -1e-3),
        (["--weights", "-1", ".5"], "weights", (-1.0, 0.5)),
        (["--weights=-.5"], "weights", (-0.5,)),
        (["--shape", "4", "5"], "shape", (4, 5)),
        (["--system-prompt=--be brief"], "model.system_prompt", "--be brief"),
        (["--system-prompt", "a = b"], "model.system_prompt", "a = b"),
        (["--learning_rate", "1e-6"], "optim.learning_rate", 1e-6),
        (
            ["--chat-template-kwargs", '{"enable_thinking": false, "n": [1]}'],
            "model.chat_template_kwargs",
            {"enable_thinking": False, "n": [1]},
        ),
        (["--gamma", "1"], "model.chat_template_kwargs", {}),
        (["--lora.r", "4", "--lora.target-modules", "q_proj", "v_proj"], "lora.target_modules", ("q_proj", "v_proj")),
    ):
        assert value_of(parse(*BASE, *argv), field) == value, argv


def test_flag_wins_over_yaml_wins_over_default(fork):
    Path("c.yaml").write_text("method: my_pkg.algo\nmodel: m\ndata: [a, b]\nlearning_rate: 1e-6\nlora: {r: 4}\nseed: 3")
    cfg = parse("--config", "c.yaml", "--seed", "9", "--data", "z")
    assert cfg.optim.learning_rate == 1e-6  # PyYAML reads 1e-6 as a string
    assert (cfg.lora.r, cfg.run.seed, cfg.data.data) == (4, 9, ("z",))
    assert parse("--config=c.yaml").data.data == ("a", "b")


def test_yaml_reaches_its_field(fork):
    for text, field, value in (
        ("max_steps: null", "run.max_steps", None),
        ("max-steps: 5", "run.max_steps", 5),
        ("stop: ['-a', '--model', 'b c', '-3', '']", "stop", ("-a", "--model", "b c", "-3", "")),
        ("stop: []", "stop", ()),
        ("stop: one", "stop", ("one",)),
        ("weights: [-1, 2.5e-3, .inf]", "weights", (-1.0, 0.0025, float("inf"))),
        ("system_prompt: '-x\n\n  = y'", "model.system_prompt", "-x\n= y"),
        ("packing: false", "run.packing", False),
        ("lora: {r: 4, target_modules: [q, v]}", "lora.target_modules", ("q", "v")),
        ("lora.r: 3", "lora.r", 3),
        ("chat_template_kwargs: {enable_thinking: false, today: '2026-01-01'}", "model.chat_template_kwargs",
         {"enable_thinking": False, "today": "2026-01-01"}),
        ("chat_template_kwargs: '{\"a\": null}'", "model.chat_template_kwargs", {"a": None}),
        ("chat_template_kwargs: {}", "model.chat_template_kwargs", {}),
        ("data: {path: 'task:sort', split: sft, weight: 0.5}", "data.data", ("task:sort:split=sft,weight=0.5",)),
        ("data: [a.jsonl, {path: b.csv, format: gsm8k, split: 'train[:5]'}, {path: c}]", "data.data",
         ("a.jsonl", "b.csv:format=gsm8k,split=train[:5]", "c")),
        ("data: {path: a.jsonl, roles: {user: [human, person], assistant: gpt}, field_messages: a.b}", "data.data",
         (r"a.jsonl:field_messages=a.b,roles=assistant=gpt\,user=human|person",)),
        ("data: {path: a.jsonl, prompt_format: 'Well, {prompt}'}", "data.data",
         (r"a.jsonl:prompt_format=Well\, {prompt}",)),
    ):  # fmt: skip
        tree = {"method": "my_pkg.algo", "model": "m", "data": ["d"]} | yaml.safe_load(text)
        Path("c.yaml").write_text(yaml.safe_dump(tree))
        assert value_of(parse("--config", "c.yaml"), field) == value, text


def test_scale_rewards_takes_a_boolean_as_trl_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ("--method", "grpo", "--model", "m", "--data", "d.jsonl")
    for word, meant in (("true", "group"), ("False", "none"), ("batch", "batch")):
        assert parse(*argv, "--scale-rewards", word).advantage.scale_rewards == meant
        Path("c.yaml").write_text(f"scale_rewards: {word}\n")
        cfg = parse(*argv, "--config", "c.yaml")
        assert cfg.advantage.scale_rewards == meant and config_to_tree(cfg)["scale_rewards"] == meant
    assert "one of group, batch, none or true or false" in refusal(*argv, "--scale-rewards", "sometimes")


def test_bad_flags(fork):
    for argv, *lines in (
        (["--learning-rat", "1"], "--learning-rat: unknown flag; did you mean --learning-rate?"),
        (["--lr", "1"], "--lr: unknown flag; did you mean --learning-rate?"),
        (["--lora-r", "1"], "--lora-r: unknown flag; did you mean --lora.r?"),
        (["-gamma", "1"], "-gamma: unknown flag; did you mean --gamma?"),
        (["--no-gamma"], "--no-gamma: unknown flag; did you mean --gamma?"),
        (["--qqq"], "--qqq: unknown flag; --help-all"),
        (["--reward-funcs", "x"], "--reward-funcs: unknown flag; only gdpo, grpo, online_dpo, opd, ppo, "),
        (["--gamma"], "--gamma: needs a value"),
        (["--gamma", "1", "2"], "--gamma=1 2: takes one value, got 2"),
        (["--method", "grpo", "x"], "--method=grpo x: takes one value, got 2"),
        (["--gamma", "x"], "--gamma=x: expected a number"),
        (["--max-steps", "1.5"], "--max-steps=1.5: expected a whole number or None"),
        (["--dtype", "f16"], "--dtype=f16: must be one of auto, float32, bfloat16"),
        (["--report-to", "none", "x"], "--report-to=x: must be one of tensorboard, wandb, trackio, none"),
        (["--packing", "maybe"], "--packing=maybe: expected true or false"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs=[1]: expected a JSON object"),
        (["--no-packing", "x"], "--no-packing: takes no value; remove x"),
        (["--lora.r", "-1"], "lora.r=-1: "),
        (["--gamma", "10"], "gamma=10.0: above 9"),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
        (["--train-data", "x"], "--train-data: unknown flag; did you mean --data?"),
        (["--base-model", "x"], "--base-model: unknown flag; did you mean --model?"),
        (["--load-in-8bit", "x"], "--load-in-8bit: unknown flag; --help-all"),
        (["--run-name", "x"], "--run-name: unknown flag; did you mean --output-dir?"),
        (["--push-to-hub"], "--push-to-hub: unknown flag; no upload during a run, use python -m trainer.push"),
        (["--attn-implementation", "flash_attention_2"], "--attn-implementation=flash_attention_2: must be one of "),
        # all mistakes, one line each
        (["--model-name-or-path", "x", "--qqq", "--gamma", "a", "--dtype", "f16"], "--model-name-or-path: unknown",
         "--qqq: unknown", "--gamma=a: expected", "--dtype=f16: must be"),
        (["--lora.r", "-1", "--learning-rate", "0"], "lora.r=-1: ", "learning_rate=0.0: "),
    ):  # fmt: skip
        found = refusal(*BASE, *argv).splitlines()
        assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


BEFORE_TORCH = """
import sys
class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "datasets"):
            raise SystemExit(f"imports {name}")
sys.meta_path.insert(0, NoTorch)
from trainer.__main__ import main
for argv in map(str.split, sys.argv[1:]):
    try:
        print(main(argv), flush=True)
    except SystemExit as stop:
        print(stop, flush=True)
"""


def test_names_flags_and_files_are_checked_before_torch_is_imported(tmp_path):
    (tmp_path / "c.yaml").write_text("method: grpo\nlearning_rat: 1\n")
    cases = {
        "--method grop": "did you mean grpo?",
        "--method grpo --learning-rat 1 --max-stps": "--learning-rat: unknown flag; did you mean --learning-rate?",
        "--config c.yaml": "c.yaml: learning_rat: unknown key; did you mean learning_rate?",
        "--config no.yaml": "no.yaml: ",
        "--resume runs/no": "--resume=runs/no: ",
        "--method sft --data no.jsonl:split=train[:9]": "data=no.jsonl: no such file",
        "--method dpo --eval-data ./no.csv": "data=./no.csv: no such file",
        "--method grpo --model ./no": "model=./no: no such folder",
        "--method grpo --reward-funcs no.py:f": "reward_funcs=no.py:f: ",
        "--method grpo": "loading grpo",  # the first line; a run then imports torch
    }
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEFORE_TORCH, *cases]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split("\n") == [*["2"] * (len(cases) - 1), "imports torch", ""], done.stderr
    lines = [line for line in done.stderr.splitlines() if "--max-stps" not in line]
    assert len(lines) == len(cases) and all(map(str.__contains__, lines, cases.values())), done.stderr


def test_flags_read_from_source_are_those_of_the_class():
    def kind(flag: Flag) -> tuple[bool, ...]:
        is_dict = any(dict in (member, get_origin(member)) for member in flag.members)
        return bool in flag.members, flag.is_list, NoneType in flag.members, is_dict

    for name in cli.method_names():
        table = flag_table(cli.load_method(name).Config)
        source = cli.source_flags(f"trainer.methods.{name}")
        assert {key: kind(flag) for key, flag in source.items()} == {key: kind(flag) for key, flag in table.items()}


def test_bad_yaml_names_file_and_key(fork):
    for text, *lines in (
        ("learning_rat: 1", "learning_rat: unknown key; did you mean learning_rate?"),
        ("lora: {rank: 1}", "lora.rank: unknown key; did you mean lora.r?"),
        ("optim: {seed: 1}", "optim={'seed': 1}: expected a plain value"),
        ("gamma: x", "gamma=x: expected a number"),
        ("gamma: [1, 2]", "gamma=[1, 2]: expected a plain value"),
        ("dtype: f16", "dtype=f16: must be one of auto, float32, bfloat16"),
        ("system_prompt: yes", "system_prompt=True: YAML reads this as true or false"),
        ("packing: 3", "packing=3: expected true or false"),
        ("chat_template_kwargs: [1]", "chat_template_kwargs=[1]: expected a plain value"),
        ("chat_template_kwargs: {today: 2026-01-01}", "chat_template_kwargs={'today': datetime.date(2026, 1, 1)}: "),
        ("eval_data:", "eval_data: has no value"),
        ("eval_data: [{split: x}]", "eval_data={'split': 'x'}: a data entry needs a path"),
        ("data: [{path: x, type: y}]", "data={'path': 'x', 'type': 'y'}: write format: y"),
        ("seed: 1\nseed: 2", "not valid YAML in line 2: key seed is given twice"),
        ("seed: [1", "not valid YAML in line 2: "),
        ("- 1", "not a mapping of settings"),
        ("base_model: x\ndata: y", "base_model: unknown key; did you mean model?"),
        ("datasets: [{path: x}]\nmodel: m", "datasets: unknown key; use data"),
        ("rl: dpo\nlora: {rank: 1}\nlr: 1\ngamma: x", "rl: unknown key; write method: dpo", "lora.rank: unknown key",
         "lr: unknown key", "gamma=x: expected"),
        ("lora_r: 4", "lora_r: unknown key; did you mean lora.r?"),
        ("reward_funcs: [x]", "reward_funcs: unknown key; only gdpo, grpo, "),
        ("gamma: 10\nlora: {r: -1}", "lora.r=-1: "),
        ("gamma: 10", "gamma=10.0: above 9"),
        ("trl: {gamma: 4}", "trl: unknown key; write its settings without it, as gamma: ..."),
    ):  # fmt: skip
        Path("c.yaml").write_text(text + "\n")
        found = refusal(*BASE, "--config", "c.yaml").splitlines()
        assert len(found) == len(lines) and all(map(str.startswith, found, (f"c.yaml: {x}" for x in lines))), found


def test_bad_method(fork):
    Path("axo.yaml").write_text("rl: dpo\nmodel: m\ndatasets: [{path: x, type: chatml.intel}]\n")  # half ours
    Path("trl.yaml").write_text("model_name_or_path: m\nlearning_rate: 1e-6\n")
    for argv, *lines in (
        (["--method", "grp"], "--method=grp: unknown method; did you mean grpo?"),
        (["--method", "my_pkg.other"], "--method=my_pkg.other: no module my_pkg.other here or installed; run from"),
        (["--method", "pkg.grpo"], "--method=pkg.grpo: no module pkg here or installed; did you mean grpo?"),
        (["--method", "os.path"], "--method=os.path: has no Config"),
        (["--method"], "--method: needs a value"),
        (["--metod", "grpo"], "--metod: unknown flag; did you mean --method?"),
        (["--method", "my_pkg.algo"], "--model and --data: required; python -m trainer --method my_pkg.algo --help"),
        (["--config", "trl.yaml"], "trl.yaml: this is a TRL config; convert it with python -m trainer.from_trl"),
        (["dpo", "--model", "m"], "dpo: write --method dpo"),
        (["run.yaml"], "run.yaml: write --config run.yaml"),
        (["--config", "axo.yaml"], "axo.yaml: rl: unknown key; write method: dpo", "axo.yaml: datasets: unknown key"),
        (["--method", "gspo"], "--method=gspo: unknown method; it is a setting of grpo: --method grpo "
         "--importance-sampling-level sequence"),
        (["--method", "dop"], "--method=dop: unknown method; did you mean dpo?"),
        (["--method", "reward"], "--method=reward: unknown method; did you mean rm?"),
        (["--method", "dapo"], "--method=dapo: unknown method; it is a loss of grpo: --method grpo --loss-type dapo"),
    ):  # fmt: skip
        found = refusal(*argv).splitlines()
        assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found
    for argv in (["--model", "m"], ["--method", "zzz"]):
        message = refusal(*argv)
        assert all(name in message for name in cli.method_names()) and "did you mean" not in message


def test_broken_import_inside_a_fork_keeps_its_own_error(fork):
    (fork / "my_pkg" / "broken.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        cli.parse(["--method", "my_pkg.broken"])


def test_config_without_run_block_is_refused(fork):
    (fork / "my_pkg" / "bare.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    x: int = 1\ndef train(cfg): ...\n"
    )
    assert refusal("--method", "my_pkg.bare") == (
        "--method=my_pkg.bare: its Config has no run block; add the field run: Flat[RunConfig]"
    )


def test_tiny_recipe_fills_in_only_when_nothing_names_a_model(fork, capsys):
    (fork / "my_pkg" / "algo_tiny.yaml").write_text("model: tiny\ndata: [task:addition]\ngamma: 3\nseed: 5\n")
    cfg = parse("--method", "my_pkg.algo", "--seed", "6")
    assert (cfg.model.model, cfg.data.data, cfg.gamma, cfg.run.seed) == ("tiny", ("task:addition",), 3.0, 6)
    assert capsys.readouterr().err == ("no model given: settings not named elsewhere come from my_pkg/algo_tiny.yaml\n")
    assert parse(*BASE).gamma == 1.0
    Path("c.yaml").write_text("model: mine\ndata: [x]\n")
    assert parse("--method", "my_pkg.algo", "--config", "c.yaml").gamma == 1.0
    assert capsys.readouterr().err == ""


# a run to resume -------------------------------------------------------------------------------------------------


def make_run(folder: str, *argv: str) -> Path:
    run_dir = Path(folder)
    (run_dir / "checkpoints" / "step-00000002").mkdir(parents=True)
    save_config(run_dir / "config.yaml", config_to_tree(parse(*BASE, *argv)))
    return run_dir


def test_resume_layers_between_recipe_and_yaml(fork):
    (fork / "my_pkg" / "algo_tiny.yaml").write_text("model: tiny\ndata: [t]\nseed: 5\n")
    make_run("out", "--gamma", "2", "--seed", "7", "--max-steps", "3")
    Path("c.yaml").write_text("seed: 8\n")
    cfg = parse("--resume", "out", "--config", "c.yaml", "--max-steps", "9")
    assert (cfg.model.model, cfg.gamma, cfg.run.seed, cfg.run.max_steps) == ("m", 2.0, 8, 9)
    assert (cfg.run.method, cfg.run.output_dir, cfg.run.resume) == ("my_pkg.algo", "out", "latest")


def test_a_resume_in_another_folder_names_both_folders(fork, monkeypatch):
    for name in ("rows.jsonl", "my_rewards.py", "calendar.py"):
        Path(name).touch()
    run_dir = make_run("runs/a", "--output-dir", "runs/{method}", "--data", "rows.jsonl:weight=2").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    reason = (
        f"not found in the working folder {fork}/elsewhere, but in {fork}, where the run was started; resume the run "
        "from there"
    )
    assert refusal("--resume", str(run_dir)) == f"data=rows.jsonl:weight=2: {reason}"
    assert parse("--resume", str(run_dir), "--data", "t").data.data == ("t",)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(fork)])
    point = cli.ResumePoint(run_dir, "latest", {"output_dir": "runs/a"})
    for word in ("my_rewards.correct", "my_rewards.py:correct"):
        with pytest.raises(UserError, match=f"^reward_funcs={word}: {reason}"):
            cli._check_working_folder(point, {"reward_funcs": cli.FlagValue((word,))})
    cli._check_working_folder(point, {"reward_funcs": cli.FlagValue(("calendar.month", "exact_match"))})  # importable
    cli._check_working_folder(point, {"system_prompt": cli.FlagValue(("Be brief. " * 99,))})  # longer than any path
    moved = cli.ResumePoint(Path("/out"), "latest", {"output_dir": "runs/a"})
    cli._check_working_folder(moved, {"data": cli.FlagValue(("rows.jsonl",))})


def test_resume_accepts_a_checkpoint_folder(fork):
    make_run("out")
    for text in ("out/checkpoints/step-00000002", str(fork / "out/checkpoints/step-00000002")):
        cfg = parse(f"--resume={text}")
        assert (cfg.run.output_dir, cfg.run.resume) == ("out", text)


def test_bare_resume_with_output_dir_takes_that_run(fork):
    make_run("out")
    make_run("runs/algo-20250101-000000")
    for argv in (["--output-dir=out", "--resume"], ["--resume", "latest", "--output-dir", "out"]):
        assert parse(*argv).run.output_dir == "out"


def test_bare_resume_takes_the_run_written_to_last(fork):
    for age, name in enumerate(("algo-by-hand", "algo-20250102-000000", "algo-20270101-000000")):
        make_run(f"runs/{name}")
        os.utime(f"runs/{name}/config.yaml", (1e9 - age, 1e9 - age))
    (fork / "runs" / "algo-20280101-000000").mkdir()  # no config.yaml: no run
    assert parse("--resume").run.output_dir == "runs/algo-by-hand"
    (fork / "runs" / "algo-20250102-000000" / "metrics.jsonl").touch()
    assert parse("--method", "my_pkg.algo", "--resume").run.output_dir == "runs/algo-20250102-000000"
    cfg = parse("--resume", "--output-dir", str(fork / "runs" / "{method}-{time}"), "--method", "my_pkg.algo")
    assert cfg.run.output_dir == str(fork / "runs" / "algo-20250102-000000")


def test_saved_config_drops_what_was_said_to_one_call(fork):
    run = RunConfig(method="my_pkg.algo", resume="latest", overwrite_output_dir=True)
    cfg = dataclasses.replace(parse(*BASE), run=run)
    save_config(Path("config.yaml"), config_to_tree(cfg))
    again = parse("--config", "config.yaml")
    assert (again.run.resume, again.run.overwrite_output_dir, again.run.method) == (None, False, "my_pkg.algo")


def test_bad_resume(fork):
    make_run("out")
    for argv, sentence in (
        (["--resume", "nowhere"], "--resume=nowhere: no such folder"),
        (["--resume", "my_pkg"], "--resume=my_pkg: not a run folder"),
        (["--resume"], "--resume: no earlier run in runs"),
        (["--resume", "--method", "grpo"], "--resume: no earlier grpo run in runs"),
        (["--resume", "--output-dir", "x"], "--resume: x contains no run (no config.yaml)"),
        (["--resume", "out", "--output-dir", "x"], "--output-dir=x: cannot be changed when resuming out"),
        (["--resume", "out", "--method", "grpo"], "--method=grpo: the run in out used my_pkg.algo"),
        (["--resume", "out", "--overwrite-output-dir"], "--overwrite-output-dir would delete the run to resume"),
    ):
        assert refusal(*argv).startswith(sentence)
    config = Path("out/config.yaml")
    config.write_text(config.read_text().replace("gamma: ", "gamma: 1"))
    assert refusal("--resume", "out").startswith("out/config.yaml: gamma=1")
    assert refusal("--resume", "out", "--gamma", "10").startswith("gamma=10.0: above 9")


# every method ----------------------------------------------------------------------------------------------------


def test_config_survives_the_round_trip_and_a_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for method in cli.method_names():
        base = ["--method", method, "--model", "m", "--data", "a:split=train[:5]", "b", "--lora.r", "4"]
        base += ["--chat-template-kwargs", '{"enable_thinking": false}']
        base += ["--teacher", "t"] if method == "opd" else []
        cfg = parse(*base, "--learning-rate", "3e-7", "--max-steps", "None", "--no-packing", "--report-to", "none")
        assert cfg.model.chat_template_kwargs == {"enable_thinking": False}
        save_config(tmp_path / "config.yaml", config_to_tree(cfg))
        assert parse("--config", "config.yaml") == cfg
        resumed = parse("--resume", ".", "--max-steps", "2")
        again = dataclasses.replace(resumed.run, max_steps=None, resume=None, output_dir=cfg.run.output_dir)
        assert dataclasses.replace(resumed, run=again) == cfg


class Colour(enum.Enum):
    RED = "r"


@dataclasses.dataclass(frozen=True)
class OtherTypes:
    """Types that no Config of ours has."""

    path: Path = Path("a")
    colour: Colour | None = None
    words: list = dataclasses.field(default_factory=list)
    sizes: frozenset[int] = frozenset()
    pair: tuple[Literal["a", "b"], Literal["a", "b"]] = ("a", "b")


def test_types_of_a_users_own_config(tmp_path):
    argv = ["--path", "x/y", "--colour", "RED", "--words", "ab", "cd", "--sizes", "12", "3", "--pair", "b", "a"]
    cfg = flags.parse_command(OtherTypes, argv, "prog")
    assert cfg == OtherTypes(Path("x/y"), Colour.RED, ["ab", "cd"], frozenset({12, 3}), ("b", "a"))
    save_config(tmp_path / "config.yaml", config_to_tree(cfg))
    table = flags.flag_table(OtherTypes)
    tree = load_config(tmp_path / "config.yaml")
    assert flags.build(OtherTypes, flags.read_tree(tree, table, "config.yaml"), table, "prog") == cfg
    for words, sentence in {
        ("--colour", "r"): "--colour=r: expected one of RED or None",
        ("--pair", "a"): "--pair=a: expected 2 values, each one of a, b",
        ("--sizes", "x"): "--sizes=x: expected values, each a whole number",
    }.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            flags.parse_command(OtherTypes, words, "prog")


def test_positional_arguments_may_follow_a_flag():
    whole = ExportConfig(source="RUN", out="OUT", merge_lora=True)
    for words in ("RUN OUT --merge-lora", "--merge-lora RUN OUT", "RUN --merge-lora OUT", "--merge-lora true RUN OUT",
                  "--no-trust-remote-code RUN --merge-lora OUT"):  # fmt: skip
        assert flags.parse_command(ExportConfig, words.split(), "prog") == whole
    with pytest.raises(ValueError, match="^MORE: a value without a flag"):
        flags.parse_command(ExportConfig, ["--merge-lora", "RUN", "OUT", "MORE"], "prog")


words = st.text(max_size=8) | st.sampled_from(["-x", "--y", "-1", "a b", "1e-6", "true", "~"])
finite = st.floats(allow_nan=False)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stop=st.lists(words, max_size=3), weights=st.none() | st.lists(finite, max_size=3), system=st.none() | words,
    gamma=st.floats(max_value=9), seed=st.integers(), data=st.lists(words.filter(bool), min_size=1, max_size=3),
    rank=st.integers(0, 64), packing=st.booleans(),
)  # fmt: skip
def test_any_config_survives_the_round_trip(fork, stop, weights, system, gamma, seed, data, rank, packing):
    from my_pkg.algo import Config

    if system == "None" or gamma != gamma:
        return  # the word None is how a flag says None; nan is never equal to itself
    cfg = Config(
        model=ModelConfig(model="m", system_prompt=system),
        data=DataConfig(data=tuple(data)),
        lora=LoraConfig(r=rank),
        run=RunConfig(method="my_pkg.algo", seed=seed, packing=packing),
        optim=OptimConfig(),
        gamma=gamma,
        stop=tuple(stop),
        weights=None if weights is None else tuple(weights),
    )
    save_config(Path("config.yaml"), config_to_tree(cfg))
    assert parse("--config", "config.yaml") == cfg


def shown_flags(capsys, *argv: str) -> dict[str, str]:
    """{flag: title of its box} of what is printed before SystemExit(0)."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(list(argv))
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert stop.value.code == 0
    _, *boxes = re.split(r"^\W+ ((?:[\w-]+ )?options) \W+$", text, flags=re.MULTILINE)
    shown = {}
    for group, box in zip(boxes[::2], boxes[1::2], strict=True):
        shown |= dict.fromkeys(re.findall(r"^\W?\W?(--[a-z][a-z0-9.-]*)", box, re.MULTILINE), group)
    return shown


def test_help_shows_the_common_flags_and_help_all_every_flag(fork, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")  # wider, and tyro puts boxes side by side
    groups = {"--model": "model", "--data": "data", "--seed": "run", "--learning-rate": "optim", "--lora.r": "lora"}
    groups = {name: f"{group} options" for name, group in groups.items()}
    tables = {method: flags.flag_table(cli.load_method(method).Config) for method in cli.method_names()}
    counts = {method: sum(flag.is_common for flag in table.values()) for method, table in tables.items()}
    assert all(25 <= count <= 44 for count in counts.values()), counts
    names = {word: {flag.name for flag in tables["grpo"].values() if word == "--help-all" or flag.is_common}
             for word in ("--help", "--help-all")}  # fmt: skip
    for word, expected in names.items():
        shown = shown_flags(capsys, word, "--method", "grpo")
        assert shown.keys() == expected and groups.items() <= shown.items()
    for method in ("gdpo", "ppo"):  # which refuse it
        assert "--scale-rewards" not in shown_flags(capsys, "--help", "--method", method)
    short = shown_flags(capsys, "--help", "--method", "my_pkg.algo")
    assert {"--gamma", "--stop", "--weights", "--shape", "--model"} <= short.keys() and "--compile" not in short


def own_classes(config: type) -> list[type]:
    hints = flags.get_type_hints(config)
    return [config, *(hint for hint in hints.values() if dataclasses.is_dataclass(hint))]


def test_every_flag_has_help_of_one_paragraph():
    from docstring_parser import parse_from_object

    for block in {
        block: None for method in cli.method_names() for block in own_classes(cli.load_method(method).Config)
    }:
        family = [kind for kind in reversed(block.__mro__) if dataclasses.is_dataclass(kind)]  # ipo extends dpo
        described = {p.arg_name: p.description or "" for kind in family for p in parse_from_object(kind).params}
        hints = flags.get_type_hints(block, include_extras=True)
        for field in dataclasses.fields(block):
            for marker in getattr(hints[field.name], "__metadata__", ()):  # tyro.conf.arg(help=...)
                described.setdefault(field.name, getattr(marker, "help", None))
            if not dataclasses.is_dataclass(flags.get_type_hints(block)[field.name]):
                assert described.get(field.name), f"{block.__qualname__}.{field.name} has no text under it"
                assert "\n" not in described[field.name], f"{field.name}: write long help as ('a ' 'b')"


# the real command ------------------------------------------------------------------------------------------------


def test_bare_command_lists_the_methods(capsys):
    with pytest.raises(SystemExit, match="0"):
        main([])
    said = capsys.readouterr()
    assert said.err == ""
    for name in cli.method_names():
        assert re.search(rf"^  {name} +\S.{{10,}}$", said.out, re.M) and cli.method_summary(name) in said.out


def test_listing_does_not_import_torch(tmp_path):
    code = "import sys; from trainer.cli import method_listing; method_listing(); assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


def test_fork_runs_from_its_own_folder(fork):
    done = run(*BASE, "--data", "e", cwd=fork)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "method my_pkg.algo model m data d e\n",
        "loading my_pkg.algo and PyTorch\n",
    )
    done = run_copy(*BASE, "--gamma", "4", cwd=fork)
    assert (done.returncode, done.stderr.splitlines()[-1][:27]) == (1, "ValueError: invalid literal")


def test_exit_code_and_traceback(fork, capsys, monkeypatch):
    monkeypatch.delenv("STROP_DEBUG", raising=False)
    for argv, code, line in (
        (["--gamma", "10"], 2, "error: gamma=10.0: above 9; lower it\n"),  # a check of the user's Config
        (["--learning-rate", "-1"], 2, "error: learning_rate=-1.0: must be above 0 and finite\n"),
        (["--gamma", "6"], 130, "interrupted; continue with --resume\n"),
    ):
        assert (main([*BASE, *argv]), capsys.readouterr().err) == (code, line)
    for gamma, message in (("5", "refused by the loop"), ("4", "invalid literal"), ("7", "Expecting property name")):
        with pytest.raises(ValueError, match=message):  # of the user's own loop: its traceback, and exit code 1
            main([*BASE, "--gamma", gamma])
    monkeypatch.setenv("STROP_DEBUG", "1")
    with pytest.raises(ValueError, match="learning_rate=-1"):
        main([*BASE, "--learning-rate", "-1"])


def test_resumed_run_is_spread_as_its_processes_allow(monkeypatch):
    for world, kept in (
        ("1", {}),
        ("2", {"mode": "fsdp", "context": 2, "timeout_s": 9.0}),
        ("3", {"mode": "fsdp", "shard": 3, "timeout_s": 9.0}),
        ("6", {"mode": "fsdp", "shard": 3, "context": 2, "timeout_s": 9.0}),
    ):
        monkeypatch.setenv("WORLD_SIZE", world)
        saved = {"method": "sft", "parallel": {"mode": "fsdp", "shard": 3, "context": 2, "timeout_s": 9.0}}
        assert cli._as_launched(saved) == {"method": "sft", "parallel": kept}


STYLED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (style or '') }}{% endif %}"
)


@pytest.mark.parametrize("method", cli.method_names())
def test_settings_of_the_chat_template_reach_the_rows_of_every_method(method, tmp_path):
    """Each method's own call of its loader, with a tokenizer in place of a model."""
    from types import SimpleNamespace

    from trainer.methods import ebft, kto, prm, rm, sft
    from trainer.offline.pairs import pairs_of
    from trainer.policy.load import load_tokenizer
    from trainer.rl.setup import prompts_of

    (tmp_path / "styled.jinja").write_text(STYLED)
    user = [{"role": "user", "content": "2+2="}]
    row = {"prompt": user, "completion": "!4", "chosen": "!4", "rejected": "!5", "label": True, "completions": ["4"],
           "labels": [True]}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    cfg = parse(
        "--method", method, "--chat-template", str(tmp_path / "styled.jinja"), "--chat-template-kwargs",
        '{"style": "!"}',
    )  # fmt: skip
    tokenizer = load_tokenizer(str(ROOT / "trainer" / "tiny"), cfg.model)
    policy = SimpleNamespace(tokenizer=tokenizer, context_length=None)
    network = SimpleNamespace(policy=policy)
    ours = {
        "sft": lambda specs: sft.examples_of(cfg, policy, specs),
        "kto": lambda specs: kto.load_rows(cfg, policy, specs),
        "rm": lambda specs: rm.pairs_of(cfg, policy, specs),
        "prm": lambda specs: prm.solutions_of(cfg, policy, specs, last_step_only=False),
        "ebft": lambda specs: ebft.targets_of(cfg, policy, network, specs),
    }
    ours |= dict.fromkeys(("dpo", "ipo", "cpo", "orpo", "simpo"), lambda specs: pairs_of(cfg, policy, specs))
    sampling = ("grpo", "gdpo", "rloo", "opd", "online_dpo", "ppo", "sdpo")
    ours |= dict.fromkeys(sampling, lambda specs: prompts_of(cfg, policy, specs))
    (made,) = ours[method]((str(tmp_path / "rows.jsonl"),))
    ids = made.prompt_ids if hasattr(made, "prompt_ids") else made.ids
    assert "<|im_start|>assistant\n!" in tokenizer.decode(ids)
    with pytest.raises(ValueError, match="the chat template does not read 'style'"):
        load_tokenizer(str(ROOT / "trainer" / "tiny"), dataclasses.replace(cfg.model, chat_template="chatml"))
