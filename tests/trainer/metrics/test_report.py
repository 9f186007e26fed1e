"""Test the report page of realistic runs: GRPO, SFT, unfinished and empty."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest
import yaml

from trainer.metrics.metrics import JsonlLog
from trainer.metrics.report import curve_svg, flatten, outline, smooth, tick_texts, value_axis, write_report
from trainer.report import main

CONFIG = {
    "method": "grpo",
    "model": "builtin:tiny",
    "data": ["task:addition:split=train"],
    "eval_data": ["task:addition:split=eval,size=500"],
    "data_format": "auto",
    "output_dir": "runs/grpo-demo",
    "max_steps": 200,
    "learning_rate": 0.0003,
    "lr_scheduler_type": "cosine",
    "reward_funcs": ["exact_match", "tagged_format"],
    "num_generations": 8,
    "temperature": 1.0,
    "system_prompt": None,
    "gradient_checkpointing": False,
    "lora": {"r": 0, "alpha": 32, "dropout": 0.0, "target_modules": ["all-linear"]},
    "rollout": {"engine": "local", "max_batch_size": 256},
}


def grpo_step(step, total, rng):
    """Return metrics like those of a small GRPO run that learns its task."""
    skill = 1 / (1 + math.exp(-8 * (step / total - 0.45)))
    accuracy = min(0.99, 0.38 + 0.58 * skill + rng.gauss(0, 0.035))
    spread = math.sqrt(accuracy * (1 - accuracy))
    return {
        "reward/mean": accuracy + 0.2,
        "reward/std": spread,
        "reward/zero_std_frac": min(1.0, max(0.0, 0.15 + 0.5 * skill + rng.gauss(0, 0.06))),
        "reward/exact_match/mean": accuracy,
        "reward/exact_match/std": spread,
        "reward/tagged_format/mean": min(1.0, 0.7 + 0.3 * skill),
        "reward/tagged_format/std": 0.1,
        "policy/entropy": 0.42 * math.exp(-2.2 * step / total) + abs(rng.gauss(0, 0.015)),
        "policy/clip_frac": abs(rng.gauss(0.01, 0.006)),
        "policy/ratio": 1.2 + abs(rng.gauss(0, 0.3)),
        "policy/behaviour_kl": abs(rng.gauss(0, 2e-7)),
        "loss/total": rng.gauss(0, 0.002),
        "loss/policy": rng.gauss(0, 0.002),
        "optim/grad_norm": abs(rng.gauss(0.8, 0.25)) + (14.0 if 60 <= step < 66 else 0.0),
        "optim/lr": 3e-4 * 0.5 * (1 + math.cos(math.pi * step / total)),
        "rollout/len_mean": 3.4 + rng.gauss(0, 0.05),
        "rollout/len_max": 5.0 + rng.randrange(3),
        "rollout/truncated_frac": max(0.0, 0.05 * (1 - skill) + rng.gauss(0, 0.01)),
        "time/step_s": 0.92 + abs(rng.gauss(0, 0.05)),
        "time/rollout_s": 0.4,
        "time/reward_s": 0.004,
        "time/train_s": 0.5,
        "time/wall_s": 0.95 * step,
        "perf/tokens_per_s": 12000 + rng.gauss(0, 400),
        "mem/peak_gib": 1.31,
        "data/epoch": step / 64,
        "data/tokens_total": 11000.0 * step,
        "data/prompts_total": 64.0 * step,
    }


def grpo_eval(skill):
    accuracy = 0.41 + 0.52 * skill
    return {
        "eval/reward/mean": accuracy + 0.2,
        "eval/exact_match/mean": accuracy,
        "eval/len_mean": 3.4 - 0.1 * skill,
        "eval/rows": 64,
    }


def make_grpo_run(folder, *, steps=200, total=200, eval_every=25, config=None, samples=None):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"max_steps": total} | (config or {}), sort_keys=False))
    rng, log = random.Random(0), JsonlLog(folder / "metrics.jsonl")
    if eval_every:
        log.write(0, grpo_eval(0.0))
    for step in range(1, steps + 1):
        evaluated = eval_every and (step % eval_every == 0 or step == total)
        log.write(step, grpo_step(step, total, rng) | (grpo_eval(step / total) if evaluated else {}))
    log.close()
    log = JsonlLog(folder / "samples.jsonl")
    for step in range(1, steps + 1, 10):
        for i in range(6):
            a, b = rng.randrange(100), rng.randrange(100)
            right = rng.random() < 0.4 + 0.5 * step / total
            log.write(
                step,
                {
                    "prompt": f"<|im_start|>user\n{a}+{b}=<|im_end|>\n<|im_start|>assistant\n",
                    "completion": str(a + b if right else a + b - 10),
                    "rewards": {"exact_match": float(right), "tagged_format": None if i == 3 else 1.0},
                    "advantage": 0.8 if right else -1.1,
                },
            )
    for sample in samples or []:
        log.write(steps, sample)
    log.close()
    return folder


def make_sft_run(folder, steps=120):
    folder.mkdir(parents=True)
    config = {"method": "sft", "model": "Qwen/Qwen2.5-0.5B-Instruct", "data": ["chat.jsonl"], "max_steps": steps}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rng, log = random.Random(1), JsonlLog(folder / "metrics.jsonl")
    log.write(0, {"eval/nll": 2.31})
    for step in range(1, steps + 1):
        nll = 1.1 + 1.2 * math.exp(-4 * step / steps) + rng.gauss(0, 0.08)
        metrics = {"loss/total": nll, "loss/nll": nll, "optim/grad_norm": 1.4, "optim/lr": 2e-5, "time/step_s": 2.0}
        log.write(step, metrics | ({"eval/nll": 1.19} if step == steps else {}))
    log.close()
    return folder


class Page(HTMLParser):
    """Parse tags, attributes and text of a page; assert that tags are balanced."""

    VOID = {"meta", "link", "img", "br", "hr", "input"}

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(html)
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def flat(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def read(path):
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert not [a for a in page.attributes if a[0] in ("src", "href", "onload", "onerror", "onclick")]
    assert "http://" not in html and "https://" not in html and "url(" not in html and "@import" not in html
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    return page


CUSTOM = {  # logged by custom code
    "reward/log/almost_one": lambda step: 0.99999 + 1e-6 * (step % 10),
    "distill/kl": lambda step: 1e-5 * (step % 7),
    "bare": lambda step: 3e9 + 1e7 * (step % 3),
    "distill/constant": lambda step: 0.25,
    "distill/never": lambda step: math.nan,
}
DEFAULTS = {"method": "", "data": [], "max_steps": None, "learning_rate": 1e-6, "num_generations": 8,
            "temperature": 1.0, "lora": {"r": 0, "alpha": 32}}  # fmt: skip


def make_pair_run(folder, name="dpo", extra=None):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": name, "model": "m", "max_steps": 30}))
    log = JsonlLog(folder / "metrics.jsonl")
    log.write(0, {"eval/loss": 0.69, "eval/reward/accuracy": 0.5, "eval/rows": 9})
    for step in range(1, 31):
        pair = {"reward/chosen": 0.1 * step, "reward/rejected": -0.1 * step}
        more = {"reward/accuracy": 0.5 + step / 100, "reward/margin": 0.2 * step, "loss/sigmoid": 1 / step}
        log.write(step, {"loss/total": 1 / step, "optim/grad_norm": 1.0, **pair, **(more if extra is None else extra)})
    log.close()
    return folder


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """Write the page of a finished run with custom metrics."""
    folder = make_grpo_run(tmp_path_factory.mktemp("runs") / "grpo-demo")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").unlink()
    log = JsonlLog(folder / "metrics.jsonl")
    for line in lines:
        log.write(
            line["step"], line | ({name: make(line["step"]) for name, make in CUSTOM.items()} if line["step"] else {})
        )
    log.close()
    path = write_report(folder, DEFAULTS)
    assert path.stat().st_size < 600_000
    return path.read_text(), read(path).flat


def test_a_finished_grpo_run(grpo):
    _, flat = grpo
    assert "grpo builtin:tiny" in flat and "unfinished" not in flat
    assert "Steps 200 " in flat and "Wall time 3:10" in flat
    assert "Held-out evaluation greedy" in flat and "reward/mean sampled at temperature 1" in flat
    assert "reward, step 0 \u2192 200, 64 rows" in flat and flat.index("Samples") < flat.index("Curves")
    assert "0.610 \u2192 1.13 +0.520" in flat  # eval/reward/mean before and after
    assert "exact_match/mean 0.410 0.930 +0.520" in flat
    assert "4 steps from 62 to 65; no longer active" in flat and "health/grad_norm_high" in flat


def test_every_logged_metric_is_on_the_page_once_with_its_definition(grpo):
    html, _ = grpo
    charts = dict(re.findall(r'<span class="mono">([^<]+)</span>.*?<p class="definition">([^<]*)</p>', html, re.DOTALL))
    assert len(charts) > 20 and all(charts.values())
    folded = dict(re.findall(r'<td class="mono">([^<]+)</td><td class="num">([^<]*)</td><td class="soft">', html))
    logged = {*grpo_step(1, 200, random.Random(0)), *CUSTOM}
    assert charts.keys() | folded.keys() >= logged and not charts.keys() & folded.keys()
    assert folded["distill/constant"] == "0.25" and folded["distill/never"] == "never a finite number"
    assert folded["mem/peak_gib"] == "1.31" and folded["reward/exact_match/std"] == "same as reward/std"
    assert folded["policy/behaviour_kl"] == "0 up to rounding"
    assert "last 0.99999" in html and ">0.9999900<" in html and charts["bare"] == "Logged by custom code."


def test_best_and_worst_samples(grpo):
    _, flat = grpo
    best, worst = flat.partition("Best of steps 101 to 191")[2].partition("Worst of steps 101 to 191")[::2]
    worst = worst.partition("For comparison: step 1")[0]
    assert best.count("exact_match 1.00 tagged_format 1.00") == 3 and worst.count("exact_match 0 ") == 3


def test_best_samples_have_an_advantage_and_an_expected_answer(tmp_path):
    solved = [{"completion": f"solved{i}", "rewards": {"f": 9.0}, "advantage": 0.0, "truth": "<4>"} for i in range(9)]
    learned = [{"completion": f"learned{i}", "rewards": {"f": 9.0}, "advantage": 0.5, "truth": "<4>"} for i in range(2)]
    samples = [{"prompt": "2+2=", **sample} for sample in [*learned, *solved, *solved]]
    flat = read(write_report(make_grpo_run(tmp_path / "run", steps=3, samples=samples))).flat
    best, worst = flat.partition("Best of ")[2].partition("Worst of ")[::2]
    assert "prompt completion expected rewards advantage" in best and "<4>" in best
    assert "learned0" in best and "learned1" in best and "learned" not in worst
    samples = [sample | {"advantage": 0.0} for sample in samples]  # without any advantage, the highest rewards
    flat = read(write_report(make_grpo_run(tmp_path / "none", steps=3, samples=samples))).flat
    assert "Best of " in flat


def test_the_learning_rate_is_not_smoothed(grpo):
    html, _ = grpo
    assert "(smoothed" not in html.partition('aria-label="optim/lr over steps"')[2].partition("</svg>")[0]
    assert "(smoothed" in html.partition('aria-label="policy/entropy over steps"')[2].partition("</svg>")[0]


SELECTOR = re.compile(
    r"\.charts(\.wide)? > (?:\*|(:only-child)|:nth-child\((3n\+1|odd)\):nth-last-child\((\d)\)( ~ \*)?)"
)


def columns_of_charts(css, count, *, wide):
    """Return how many of the six columns each chart takes at 1200 px, by the rules of report.css."""
    spans = [(0, 0)] * count  # specificity, columns
    block = css.partition("@media (min-width: 1081px)")[2].partition("svg { display")[0]
    for selectors, columns in re.findall(r"([^{};/]+)\{\s*grid-column: span (\d);", block):
        for selector in selectors.split(","):
            of_wide, only, nth, last, siblings = SELECTOR.fullmatch(selector.strip()).groups()
            first = count - int(last) + 1 if last else 1  # counted from 1
            if (of_wide and not wide) or (only and count > 1) or first < 1 or (nth and first % (2 + ("3" in nth)) != 1):
                continue
            for i in range(count) if not last else range(first, count) if siblings else [first - 1]:
                spans[i] = max(spans[i], (len(re.findall("[.:]", selector)), int(columns)), key=lambda span: span[0])
    return [columns for _, columns in spans]


def test_no_row_of_charts_is_half_empty(grpo):
    html, _ = grpo
    assert len(re.findall(r'<div class="charts">', html)) == 2  # one for all areas and one folded, not one per area
    for wide in (False, True):
        for count in range(1, 30):
            used = 0
            for columns in columns_of_charts(html.partition("</style>")[0], count, wide=wide):
                assert columns and used + columns <= 6, (count, wide)
                used = (used + columns) % 6
            assert used == 0, (count, wide)


def test_config_shows_differences_first(grpo):
    html, flat = grpo
    changed, everything = flat.partition("Different from the defaults")[2].partition("All 20 settings")[::2]
    assert "learning_rate 0.0003 default 1e-06" in changed and "max_steps 200 default none" in changed
    assert "num_generations" not in changed and "lora.alpha" not in changed and "system_prompt none" in changed
    assert "lora.alpha 32" in everything and "lora.target_modules all-linear" in everything and "<details" in html


@pytest.mark.parametrize(
    ("extra", "on_top"),
    [
        (None, ["reward/accuracy", "reward/margin"]),
        ({"reward/step_accuracy": 0.5}, ["reward/step_accuracy"]),
        ({}, ["reward/chosen", "reward/rejected"]),  # kto
    ],
)
def test_pair_methods_have_accuracy_and_margin_on_top(tmp_path, extra, on_top):
    html = write_report(make_pair_run(tmp_path / "run", extra=extra)).read_text()
    top = html.partition("<h2>Health")[0]
    assert list(dict.fromkeys(re.findall(r'<span class="mono">([^<]+)</span>', top))) == on_top
    assert "greedy" not in html and "sampled at" not in html
    assert extra is not None or "same as loss/total" in html
    assert '"lead lead-2"' in html if len(on_top) == 1 else '"lead charts"' in html


def test_an_accuracy_without_margins_is_shown_as_ties(tmp_path):
    folder = make_pair_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    ties = json.dumps({"step": 0, "eval/reward/accuracy": 0.0, "eval/reward/margin": 0.0})
    last = json.dumps({"step": 31, "eval/reward/accuracy": 0.75, "eval/reward/margin": 0.5})
    (folder / "metrics.jsonl").write_text("\n".join([ties, *lines[1:], last, ""]))
    page = read(write_report(folder))
    assert "all ties \u2192 0.750 reward/accuracy" in re.sub(r" before after change", "", page.flat)
    assert "reward/accuracy all ties 0.750 reward/margin 0 0.500 +0.500" in page.flat


def test_an_unfinished_run(tmp_path):
    page = read(write_report(make_grpo_run(tmp_path / "run", steps=112, config={"rollout": {"eval_temperature": 0.6}})))
    assert (
        "unfinished" in page.flat and "112 of 200" in page.flat and "evaluation sampled at temperature 0.6" in page.flat
    )
    assert "reward, step 0 \u2192 100" in page.flat and "latest" in page.flat
    early = read(write_report(make_grpo_run(tmp_path / "early", steps=3)))
    assert "no later evaluation yet" in early.flat and "lora.alpha 32" in early.flat, (
        "without defaults the whole config"
    )


def test_an_sft_run(tmp_path):
    html = write_report(make_sft_run(tmp_path / "sft"))
    page = read(html)
    assert "sft Qwen/Qwen2.5-0.5B-Instruct" in page.flat and "Samples" not in page.flat and "Reward" not in page.flat
    assert "nll 2.31 1.19 \u22121.12" in page.flat
    assert '<span class="change good">\u22121.12</span>' in html.read_text(), "a falling nll is good"
    assert "No findings" in page.flat and "loss/total same as loss/nll" in page.flat


def test_a_run_without_any_step_or_evaluation(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.yaml").write_text("method: grpo\nmodel: m\nmax_steps: null\n")
    page = read(write_report(folder))
    assert "the run has no --eval-data" in page.flat and "Steps 0" in page.flat
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss/total": 0.5}\n{"step": 2, "loss')
    assert read(write_report(folder)).tags.count("svg") == 2, "one chart, for wide and for narrow windows"


def test_text_from_models_and_users_is_escaped(tmp_path):
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    sample = {"prompt": evil, "completion": f"</pre></td>{evil}\x1b[31m\x00", "rewards": {evil: 9.0}, "advantage": 0.5}
    chat = [{"role": "user", "content": evil}]
    folder = make_grpo_run(
        tmp_path / "run",
        steps=30,
        config={"model": evil, "system_prompt": evil, "method": evil, "lora": {evil: evil}},
        samples=[sample, {"prompt": chat, "completion": "y" * 5000, "rewards": {"f": -9.0}, "advantage": None}],
    )
    log = JsonlLog(folder / "metrics.jsonl")
    for step in range(31, 60):
        log.write(step, {f"reward/{evil}/mean": 0.0, "reward/mean": 0.0})
    log.close()
    path = write_report(folder)
    page = read(path)
    html = path.read_text()
    assert "<script" not in html and "<img" not in html and "\x1b" not in html and "\x00" not in html
    assert page.flat.count(evil) >= 6
    assert "user: <script>" in page.flat and "1000 more characters" in page.flat and r"\x1b[31m\x00" in page.flat


def test_the_page_is_replaced_not_appended(tmp_path):
    folder = make_grpo_run(tmp_path / "run", steps=5)
    first = write_report(folder).read_text()
    second = write_report(folder).read_text()
    assert len(first) == len(second)
    assert not list(folder.glob(".tmp*"))


CUSTOM_METHOD = """
from dataclasses import dataclass, field
from trainer.config.blocks import Flat, LoraConfig, OptimConfig
@dataclass(frozen=True)
class Config:
    model: str
    temperature: float = 0.5
    optim: Flat[OptimConfig] = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
def train(cfg): ...
"""


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom_method_of_report.py").write_text(CUSTOM_METHOD)
    folder = make_grpo_run(tmp_path / "run", steps=2, config={"method": "custom_method_of_report"})
    assert main([str(folder)]) == 0 and capsys.readouterr().out.strip() == str(folder / "report.html")
    changed = read(folder / "report.html").flat.partition("Different from the defaults")[2].partition("settings")[0]
    assert "temperature 1.0 default 0.5" in changed and "model builtin:tiny" in changed and "lora.r" not in changed
    (folder / "report.html").unlink()
    (folder / ".tmp-report.html").mkdir()  # even root cannot replace a folder by a file
    for argv, message in (
        ([str(folder)], f"error: {folder / 'report.html'}: cannot be written ("),
        ([str(tmp_path / "no")], f"error: {tmp_path / 'no'}: not a run folder"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(message) and error.count("\n") == 1
    (folder / "config.yaml").write_text("a: " + "[" * 3000)
    with pytest.raises(ValueError, match="config.yaml: is nested too deeply"):
        write_report(folder)


def test_smoothing_keeps_a_straight_line_and_the_mean_of_noise():
    line = [2.0 * i for i in range(300)]
    assert smooth(line)[10:-10] == pytest.approx(line[10:-10])
    noise = [1.0, -1.0] * 150
    assert max(map(abs, smooth(noise))) < 0.1
    assert smooth([3.0]) == [3.0]


def test_a_long_run_keeps_its_spikes():
    values = [0.0] * 10_000
    values[4321] = 9.0
    points = outline(range(10_000), values)
    assert len(points) <= 300 and (4321, 9.0) in points and points == sorted(points)
    assert len(curve_svg(range(10_000), values, label="x")) < 20_000


def test_axes_have_round_unambiguous_ticks_around_the_data():
    for low, high, ticks in (
        (0.38, 0.97, ["0", "0.25", "0.50", "0.75", "1.00"]),
        (0.0, 3e-6, ["0", "1e-6", "2e-6", "3e-6"]),
        (9.9999e-5, 9.99994e-5, ["9.99990e-5", "9.99991e-5", "9.99992e-5", "9.99993e-5", "9.99994e-5"]),
        (11000, 12500, ["11.0k", "11.5k", "12.0k", "12.5k"]),
        (3e9, 3.03e9, ["3.00e9", "3.01e9", "3.02e9", "3.03e9"]),
        (0.99999, 1.0, ["0.9999900", "0.9999925", "0.9999950", "0.9999975", "1.0000000"]),
        (-0.004, 0.005, ["-0.0050", "-0.0025", "0", "0.0025", "0.0050"]),
        (1.31, 1.31, None),
        (0.0, 0.0, None),
    ):
        start, end, values = value_axis(low, high)
        assert start <= low + 1e-12 and high <= end + 1e-12 and start < end and 3 <= len(values) <= 7
        texts = tick_texts(values)
        assert len(set(texts)) == len(texts) and texts == (ticks or texts)


def test_labels_fit_the_margin():
    svg = curve_svg(range(50), [0.99999 + 1e-7 * i for i in range(50)], label="x")
    for x, label in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="end">([^<]+)', svg):
        assert float(x) > 6 * len(label), f"{label} starts left of the picture"


def test_one_point_and_constant_curves_are_drawn_inside_the_box():
    for steps, values in (([5], [0.3]), ([0, 1], [0.0, 0.0]), (list(range(50)), [1e-7] * 50)):
        svg = curve_svg(steps, values, label="x")
        numbers = [float(y) for y in re.findall(r",([\d.-]+)[ \"]", svg)]
        assert numbers and all(0 <= y <= 170 for y in numbers) and "nan" not in svg


def test_flatten_names_nested_settings_by_their_flag():
    assert dict(flatten({"a": [], "b": {"c": None, "d": [1, "x"]}})) == {"a": "none", "b.c": "none", "b.d": "1 x"}
