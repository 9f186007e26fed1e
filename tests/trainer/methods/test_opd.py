"""On-policy distillation: rejected settings, the teacher's log-probs, gradients against plain loops, whole runs."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from data.types import Prompt, TargetPrompt
from losses.distill import generalized_jsd
from rollout.engine import Completion, Group, Request, Sampling, finished
from tests.entry import ROOT, metrics, repeatable
from tests.test_resume import copy_as_if_killed
from tests.trainer.rl.group_cases import prepare
from trainer import cli, plan
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.methods import opd
from trainer.methods.grpo import backward
from trainer.methods.opd import open_teacher
from trainer.metrics.metrics import describe
from trainer.policy.load import load_policy
from trainer.policy.logps import causal_lm
from trainer.rl import teacher_server as teachers
from trainer.rl.groups import Rollout
from trainer.rl.mixed_source import MixedSource
from trainer.rl.teacher import Teacher, check_vocabulary
from trainer.rl.teacher_server import TeacherServer

TINY = ROOT / "trainer" / "tiny"
NEEDED = ("--model", "builtin:tiny", "--data", "task:addition:size=8")
HINTS = """
def shown(row):
    return [{"role": "user", "content": f"{row['prompt'][-1]['content']} (it is {row['answer']})"}]

def as_text(row):
    return row["prompt"][-1]["content"]

def number(row):
    return 7

def nothing(row):
    return []

def fails(row):
    return row["solution"]

def long(row):
    return "1+" * 300

def odd(row):
    return [{"role": "user"}]
"""


def parse(*argv: str, teacher: tuple[str, ...] = ("--teacher", "builtin:tiny_teacher")) -> opd.Config:
    return cli.parse(["--method", "opd", *NEEDED, *teacher, *argv])[1]


# Settings --------------------------------------------------------------------------------------------------------

SERVER = ("--teacher-url", "http://127.0.0.1:1")
REJECTED = {
    "no teacher": ((), (), "--teacher: required"),
    "two teachers": (SERVER, ("--teacher", "t"), "teacher_url=http://127.0.0.1:1: .* teacher=t"),
    "an address": ((), ("--teacher-url", "a:1"), "teacher_url=a:1: must begin with http"),
    "jsd by a server": (("--jsd-beta", "0.5"), SERVER, "jsd_beta=0.5: needs the teacher's whole distribution"),
    "a server's temperature": (("--temperature", "0.7"), SERVER, "temperature=0.7: a server at teacher_url"),
    "beta beyond 1": (("--jsd-beta", "1.5"), None, "jsd_beta=1.5: must be between 0 and 1"),
    "itself": ((), ("--teacher", "self"), "teacher=self: .* set --teacher-prompt"),
    "data without jsd": (("--student-data-fraction", "0.5"), None, "student_data_fraction=0.5: .* set --jsd-beta"),
    "data in groups": (
        ("--student-data-fraction", "0.5", "--jsd-beta", "1", "--num-generations", "2"), None, "num_generations=2: "
    ),
    "one to compare": (("--reward-funcs", "exact_match"), None, "num_generations=1: .* --reward-coef 0"),
    "no completion": (("--num-generations", "0"), None, "num_generations=0: must be 1 or more"),
    "dynamic sampling": (("--dynamic-sampling",), None, "dynamic_sampling=True: has no effect with opd"),
    "replay": (("--replay-buffer-size", "8"), None, "replay_buffer_size=8: has no effect with opd"),
    "evaluation": (("--eval-data", "task:addition:split=eval"), None, "eval_data=.*: evaluation measures only rewards"),
    "rows held out": (("--val-set-size", "0.1"), None, "val_set_size=0.1: evaluation measures only rewards"),
    "a moving teacher": (
        ("--sync-ref-model",), ("--teacher", "self", "--teacher-prompt", "a.b"),
        "sync_ref_model=True: the reference is also teacher=self",
    ),
    "updates of another": (("--teacher-update-rate", "0.1"), None, "teacher_update_rate=0.1: has no effect"),
    "updates and a KL": (
        ("--teacher-update-rate", "1", "--beta", "0.1"), ("--teacher", "self", "--teacher-prompt", "a.b"),
        "teacher_update_rate=1.0: beta=0.1",
    ),
    "update rate 0": (("--teacher-update-rate", "0"), None, "teacher_update_rate=0.0: must be above 0"),
    "no rewards": (("--reward-coef", "0.5"), None, "reward_coef=0.5: has no effect"),
    "reward weights": (("--reward-weights", "2"), None, "reward_weights=2: has no effect"),
    "estimator": (("--scale-rewards", "none"), None, "scale_rewards=none: has no effect"),
    "another loss": (("--loss-type", "grpo"), None, "loss_type=grpo: "),
    "skipping": (("--skip-zero-advantage-batches",), None, "skip_zero_advantage_batches=True: "),
    "mask by sign": (("--off-policy-mask-threshold", "1"), None, "off_policy_mask_threshold=1.0: has no effect"),
    "clip of jsd": (("--jsd-beta", "0", "--epsilon", "0.1"), None, "epsilon=0.1: has no effect with jsd_beta"),
    "weights of jsd": (
        ("--jsd-beta", "0", "--no-vllm-importance-sampling-correction"), None,
        "vllm_importance_sampling_correction=False: has no effect with jsd_beta",
    ),
    "rewards in jsd": (
        ("--jsd-beta", "0", "--reward-funcs", "exact_match", "--num-generations", "2"), None,
        "jsd_beta=0.0: .* set --reward-coef 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_settings_that_do_not_apply_are_rejected(case):
    argv, teacher, message = REJECTED[case]
    with pytest.raises(ValueError, match=message) as error:
        parse(*argv, **({} if teacher is None else {"teacher": teacher}))
    assert "\n" not in str(error.value)


def test_settings_that_apply():
    assert parse().num_generations == 1 and not parse().has_reward_advantage
    rewarded = parse("--reward-funcs", "exact_match", "--num-generations", "4")
    assert rewarded.has_reward_advantage and rewarded.distill.reward_coef == 1
    assert not parse("--reward-funcs", "exact_match", "--reward-coef", "0").has_reward_advantage
    itself = parse("--reward-funcs", "exact_match", "--num-generations", "2", teacher=("--teacher", "self"))
    assert itself.distill.teacher == "self"  # a KL to the initial weights, in addition to rewards
    parse("--jsd-beta", "1", "--mask-truncated-completions", "--num-iterations", "3", "--temperature", "0.5")


# The teacher -----------------------------------------------------------------------------------------------------


@cache
def tiny_policy(model: str = "builtin:tiny", *, reference: bool = False):
    return load_policy(ModelConfig(model=model), LoraConfig(), torch.device("cpu"), with_reference=reference)


def prompt_of(policy, text: str, **columns) -> Prompt:
    messages = [{"role": "user", "content": text}]
    ids = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Prompt(source=f"row {text}", prompt=messages, ids=list(ids), columns=columns)


def groups_of(policy) -> list[Group]:
    """Two prompts; the completions of one contain environment text."""
    groups = []
    for row, (text, answers) in enumerate({"17+25=": ("42", "3[2]"), "9+3=": ("12", "11")}.items()):
        prompt = prompt_of(policy, text, answer=answers[0])
        completions = []
        for answer in answers:
            ids = [*policy.tokenizer(answer, add_special_tokens=False)["input_ids"], 2]
            mask = [True, False, *([True] * (len(ids) - 2))] if row == 0 else None
            completions.append(
                Completion(prompt_ids=prompt.ids, ids=ids, logps=[-0.5] * len(ids), finish_reason="stop", text=answer,
                           versions=[(0, len(ids))], mask=mask)
            )  # fmt: skip
        groups.append(Group(row, prompt, row, "fresh", completions, [[0.0], [1.0]]))
    return groups


def rollout_of(groups: list[Group]) -> Rollout:
    return Rollout(groups, ["exact_match"], torch.ones(1), {})


def logits_by_transformers(model, prompt: list[int], ids: list[int]) -> torch.Tensor:  # (len(ids), V)
    return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("prompt", [None, "hints.shown", "hints.as_text"])
@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_teacher_logps_follow_the_teachers_prompt(prompt, temperature, tmp_path, monkeypatch):
    (tmp_path / "hints.py").write_text(HINTS)
    monkeypatch.chdir(tmp_path)
    argv = () if prompt is None else ("--teacher-prompt", prompt)
    cfg = parse(*argv, "--temperature", temperature, "--max-tokens-per-micro-batch", "40")
    policy = tiny_policy()
    teacher = open_teacher(cfg, policy)
    groups = groups_of(policy)
    teacher.read_prompts([group.prompt for group in groups])
    all_logps = teacher.logps(groups)
    model = causal_lm(teacher.policy.model)
    assert not any(p.requires_grad for p in model.parameters())
    both = [(group, completion) for group in groups for completion in group.completions]
    for (group, completion), logps in zip(both, all_logps, strict=True):
        text = group.prompt.prompt[0]["content"]
        prompt_ids = {
            None: group.prompt.ids,
            "hints.shown": prompt_of(policy, f"{text} (it is {group.prompt.columns['answer']})").ids,
            "hints.as_text": policy.tokenizer(text, add_special_tokens=False)["input_ids"],
        }[prompt]
        with torch.no_grad():
            rows = logits_by_transformers(model, prompt_ids, completion.ids).div(float(temperature)).log_softmax(-1)
        expected = rows[torch.arange(len(completion.ids)), completion.ids]
        trained = torch.tensor(completion.mask or [True] * len(completion.ids))
        torch.testing.assert_close(torch.tensor(logps), torch.where(trained, expected, 0.0), atol=2e-5, rtol=1e-4)


def test_teacher_self_is_the_reference():
    policy = tiny_policy(reference=True)
    cfg = parse("--teacher-prompt", "os.path.basename", teacher=("--teacher", "self"))
    assert open_teacher(cfg, policy).policy is policy and policy.reference is not None
    other = open_teacher(parse(), policy)
    teacher, base = causal_lm(other.policy.model), causal_lm(policy.model)
    assert not torch.equal(teacher.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(teacher.get_output_embeddings().weight, base.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r"teacher_prompt=hints.number: returned int for row 17\+25="),
        ("nothing", "returned empty list for row"),
        ("fails", r"failed on row 17\+25= \(KeyError: 'solution' \(hints.py, line \d+\)\); .*keys are answer"),
        ("long", r"row 17\+25=: .*600 tokens.* max_completion_length=256 .*context"),
        ("odd", r"teacher_prompt=hints.odd: .*messages\[0\]"),
        ("missing", "'missing'"),
    ],
)
def test_errors_of_a_prompt_function(name, message, tmp_path, monkeypatch):
    (tmp_path / "hints.py").write_text(HINTS)
    monkeypatch.chdir(tmp_path)
    policy = tiny_policy(reference=True)
    cfg = parse("--teacher-prompt", f"hints.{name}", teacher=("--teacher", "self"))
    with pytest.raises(ValueError, match=message):
        open_teacher(cfg, policy).read_prompts([group.prompt for group in groups_of(policy)])


def test_a_different_vocabulary_is_rejected(tmp_path):
    shutil.copytree(TINY, tmp_path / "t", ignore=shutil.ignore_patterns("*.py", "teacher", "__pycache__"))
    path = tmp_path / "t" / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(saved))
    cfg = parse("--jsd-beta", "0", teacher=("--teacher", str(tmp_path / "t")))  # which compares vocabularies
    tokenizer = tiny_policy().tokenizer
    assert not check_vocabulary(parse(teacher=("--teacher", str(tmp_path / "t"))), tokenizer)
    with pytest.raises(ValueError, match=r"teacher=.*275 tokens.*275.*: '[AB]' is id \d+ there and id \d+ here"):
        check_vocabulary(cfg, tokenizer)
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["<think>"])
    longer.save_pretrained(tmp_path / "t")
    with pytest.raises(ValueError, match=r"276 tokens.*275.*: '<think>' is id 275 there and unknown here"):
        open_teacher(cfg, tiny_policy())
    with pytest.raises(ValueError, match="teacher=./nowhere: "):
        open_teacher(parse(teacher=("--teacher", "./nowhere")), tiny_policy())


def test_the_memory_plan_includes_the_teacher():
    tiny = plan.sizes_for(parse()).params
    work = plan.work_of(parse(), plan.sizes_for(parse()), "cuda")
    assert (work.other_bytes, work.has_reference) == (2 * tiny, False)
    itself = parse("--teacher-prompt", "os.path.basename", teacher=("--teacher", "self"))
    assert plan.has_reference(itself) and not list(plan.other_models(itself))
    assert not list(plan.other_models(parse(teacher=SERVER)))


# Gradients -------------------------------------------------------------------------------------------------------


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def wide_teacher(policy) -> Teacher:
    """Another architecture, with a larger padded vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=288, hidden_size=48, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=128, initializer_range=0.3,
                         tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    cfg = parse("--max-tokens-per-micro-batch", "50", "--temperature", "0.8")
    return Teacher(cfg, policy, replace(policy, model=model, reference=model))


@pytest.mark.parametrize("beta", [None, 0.0, 0.4, 1.0])
def test_gradients_match_a_loop_over_completions(beta):
    policy = replace(tiny_policy(), model=copy.deepcopy(tiny_policy().model))
    teacher, groups = wide_teacher(policy), groups_of(policy)
    argv = () if beta is None else ("--jsd-beta", str(beta))
    cfg = parse(*argv, "--max-tokens-per-micro-batch", "30", "--temperature", "0.8")
    completions = rollout_of(groups).completions
    if beta is None:
        cfg = replace(cfg, correction=replace(cfg.correction, vllm_importance_sampling_correction=False))
        batch = prepare(cfg, policy, completions, teacher.logps(groups))
        sums = backward(cfg, policy, batch, loss=opd.reverse_kl_loss)
    else:
        batch = prepare(cfg, policy, completions, torch.zeros(4))
        sums = opd.backward_jsd(cfg, policy, teacher, batch, teacher.items(groups))
    vector = gradient(policy.model)
    assert len(batch.micro_batches) > 1
    policy.model.zero_grad()
    total, reverse_kl, count = torch.zeros(()), 0.0, 0
    for c in completions:
        of_teacher, of_student = (
            logits_by_transformers(model, c.prompt_ids, c.ids) for model in (teacher.policy.model, policy.model)
        )
        trained = torch.tensor(c.mask or [True] * len(c.ids))
        count += int(trained.sum())
        if beta is not None:
            divergence = generalized_jsd(of_student, of_teacher[:, :275], beta=beta, temperature=0.8)
            total = total + divergence[trained].sum()
            continue
        index = torch.arange(len(c.ids)), c.ids
        logp, teacher_logp = (x.div(0.8).log_softmax(-1)[index] for x in (of_student, of_teacher))
        gap = (logp - teacher_logp).detach()
        total, reverse_kl = total + (gap * logp)[trained].sum(), reverse_kl + float(gap[trained].sum())
    (total / count).backward()
    expected = gradient(policy.model)
    assert (vector - expected).norm() < 1e-5 * expected.norm()
    if beta is None:
        assert sums.means()["policy/reverse_kl"] == pytest.approx(reverse_kl / count, rel=1e-4)
    else:
        assert sums.means()["loss/total"] == pytest.approx(float(total.detach() / count), rel=1e-4)
        assert sums.means()["policy/jsd"] == pytest.approx(float(total.detach() / count), rel=1e-4)


@pytest.mark.parametrize("beta", [None, 0.0, 0.5, 1.0])
def test_a_teacher_equal_to_the_student_gives_no_gradient(beta):
    policy = replace(tiny_policy(), model=copy.deepcopy(tiny_policy().model))
    teacher = Teacher(parse(), policy, replace(policy, reference=policy.model))
    cfg = parse() if beta is None else parse("--jsd-beta", str(beta))
    groups = groups_of(policy)
    completions = rollout_of(groups).completions
    if beta is None:
        batch = prepare(cfg, policy, completions, teacher.logps(groups))
        backward(cfg, policy, batch, loss=opd.reverse_kl_loss)
    else:
        batch = prepare(cfg, policy, completions, torch.zeros(4))
        opd.backward_jsd(cfg, policy, teacher, batch, teacher.items(groups))
    assert gradient(policy.model).abs().max() < 1e-5


def test_the_weighted_advantage_of_rewards_is_added():
    cfg = parse("--reward-funcs", "exact_match", "--num-generations", "2", "--reward-coef", "0.5")
    rollout = rollout_of(groups_of(tiny_policy()))
    logps = [[-1.0] * len(c.ids) for c in rollout.completions]
    per_completion = SimpleNamespace(advantage=lambda rollout: torch.tensor([1.0, -1.0, 0.0, 2.0]))
    advantage = opd.teacher_advantage(cfg, per_completion, rollout, logps)
    assert [values[0] for values in advantage] == [-0.5, -1.5, -1.0, 0.0]
    per_token = SimpleNamespace(advantage=lambda rollout: [[float(n) for n in range(len(x))] for x in logps])
    assert opd.teacher_advantage(cfg, per_token, rollout, logps)[1][:3] == [-1.0, -0.5, 0.0]
    assert opd.teacher_advantage(parse(), None, rollout, logps) is logps
    assert opd.minus_engine_logps(logps, rollout)[0][0] == -0.5
    assert opd.minus_engine_logps(torch.zeros(4), rollout).sum() == 0


# Given completions -----------------------------------------------------------------------------------------------


class Sampler:
    engine = SimpleNamespace(version=3)

    def __init__(self, for_training: bool = True) -> None:
        self.sampling, self.requests = Sampling(for_training=for_training), []

    def start(self, groups) -> list[Future]:
        self.requests.append(groups)
        return [finished(["sampled"] * len(group)) for group in groups]


def requests(count: int) -> list[list[Request]]:
    rows = [
        TargetPrompt(source=f"row {n}", prompt="a", ids=[n], columns={"ground_truth": "b"}, target_ids=[5, 2])
        for n in range(count)
    ]
    return [[Request.of(row, seed=1000 + 7 * n)] for n, row in enumerate(rows)]


def test_seeds_decide_which_fraction_of_the_prompts_is_sampled():
    for fraction, count in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        sampler = Sampler()
        completions = [future.result()[0] for future in MixedSource(sampler, fraction=fraction).start(requests(8))]
        again = [future.result()[0] for future in MixedSource(Sampler(), fraction=fraction).start(requests(8))]
        is_sampled = [c == "sampled" for c in completions]
        assert sum(is_sampled) == count and is_sampled == [c == "sampled" for c in again]
        assert len(sampler.requests) == (count > 0)
        given = [c for c in completions if c != "sampled"]
        assert all(c.ids == [5, 2] and c.text == "b" and c.versions == [(3, 2)] for c in given)
        assert [c.prompt_ids[0] for c in given] == [n for n in range(8) if not is_sampled[n]]
    later = [[Request.of(group[0].prompt, seed=90 + 11 * n)] for n, group in enumerate(requests(8))]
    other = [future.result()[0] == "sampled" for future in MixedSource(Sampler(), fraction=0.5).start(later)]
    first = [future.result()[0] == "sampled" for future in MixedSource(Sampler(), fraction=0.5).start(requests(8))]
    assert other != first
    held_out = MixedSource(Sampler(for_training=False), fraction=0.5).start(requests(4))
    assert all(future.result() == ["sampled"] for future in held_out)


# A server --------------------------------------------------------------------------------------------------------


class Served(BaseHTTPRequestHandler):
    """vLLM's API for the tiny model; the replies in `script` come first."""

    protocol_version = "HTTP/1.1"
    script: list[tuple[int, object]] = []
    received: list[tuple[str, dict, str | None]] = []
    shift = 0

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "the-teacher", "max_model_len": 256}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append((self.path, request, self.headers["Authorization"]))
        if self.path == "/v1/completions" and self.script:
            return self.answer(*self.script.pop(0))
        policy = tiny_policy()
        if self.path == "/tokenize":
            ids = policy.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
            return self.answer(200, {"tokens": [i + self.shift for i in ids]})
        ids = request["prompt"]
        with torch.no_grad():
            logps = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scores = [{str(i): {"logprob": float(logps[n, i])}} for n, i in enumerate(ids[1:])]
        return self.answer(200, {"choices": [{"prompt_logprobs": [None, *scores]}]})

    def answer(self, status: int, reply: object) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(Served, "script", [])
    monkeypatch.setattr(Served, "received", [])
    monkeypatch.setattr(teachers, "PAUSE_S", 0.0)
    monkeypatch.setenv("STROP_VLLM_TOKEN", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_returns_logps_and_errors_are_retried(served):
    policy = tiny_policy()
    cfg = parse(teacher=("--teacher-url", served))
    server = open_teacher(cfg, policy)
    assert isinstance(server, TeacherServer) and server.model == "the-teacher"
    Served.script += [(500, {"error": {"message": "busy"}}), (503, {})]
    groups = groups_of(policy)
    of_server = server.logps(groups)
    local = Teacher(cfg, policy, replace(policy, reference=policy.model)).logps(groups)
    for c, *both in zip(rollout_of(groups).completions, of_server, local, strict=True):
        mask = c.mask or [True] * len(c.ids)
        remote, expected = ([x for x, trained in zip(logps, mask, strict=True) if trained] for logps in both)
        assert remote == pytest.approx(expected, abs=2e-5)
    sent = [request for path, request, _ in Served.received if path == "/v1/completions"]
    assert all(r["max_tokens"] == 1 and r["prompt_logprobs"] == 0 and r["model"] == "the-teacher" for r in sent)
    assert {token for _, _, token in Served.received} == {"Bearer secret"}
    server.close()


def test_errors_of_a_server(served, monkeypatch):
    policy, cfg = tiny_policy(), parse(teacher=("--teacher-url", served))
    server = TeacherServer(cfg, policy)
    groups = groups_of(policy)
    for script, message in [
        ([(500, {"message": "out of memory"})] * 12, "/v1/completions failed 3 times.* status 500: out of"),
        ([(400, {"message": "token id 300 is out of vocabulary"})] * 4, r"/v1/completions \(400: token id 300"),
        ([(401, {})] * 4, "STROP_VLLM_TOKEN"),
        ([(200, {"choices": []})] * 4, "no log-probs"),
        ([(200, {"choices": [{"prompt_logprobs": [None]}]})] * 4, "no log-probs"),
    ]:
        Served.script[:] = script
        with pytest.raises(ValueError, match=f"^teacher_url={served}: .*{message}"):
            server.logps(groups)
    server.close()
    Served.script[:] = []
    monkeypatch.setattr(Served, "shift", 1)
    with pytest.raises(ValueError, match="'The quick brown .* model=buil"):
        TeacherServer(cfg, policy)
    gone = parse(teacher=("--teacher-url", "http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="failed 3 times.* connection refused"):
        TeacherServer(gone, policy)


# Runs ------------------------------------------------------------------------------------------------------------

SMALL = (
    "--method", "opd", "--max-steps", "4", "--save-steps", "2", "--eval-steps", "2", "--per-device-train-batch-size",
    "8", "--data", "task:addition:split=train,size=64", "--seed", "5",
)  # fmt: skip
MEASURED = ("--eval-data", "task:addition:split=eval,size=8")
NO_REWARDS = (
    "--method", "opd", "--model", "builtin:tiny", "--teacher", "builtin:tiny_teacher", "--max-steps", "4",
    "--save-steps", "2", "--data", "task:addition:split=train,size=64", "--max-completion-length", "8", "--seed", "5",
)  # fmt: skip
RUNS = {
    "no rewards": NO_REWARDS,
    "jsd, two iterations": (*NO_REWARDS, "--jsd-beta", "0.5", "--num-iterations", "2"),
    "mini-batches": (*NO_REWARDS, "--minibatches-per-rollout", "2", "--entropy-target", "2", "--beta", "0.1",
                     "--sync-ref-model", "--ref-model-sync-steps", "1"),
    "jsd, mini-batches": (*NO_REWARDS, "--jsd-beta", "0.5", "--minibatches-per-rollout", "2"),
    "given completions": (*NO_REWARDS[:10], "--data", "rows.jsonl", *NO_REWARDS[12:], "--jsd-beta", "0",
                          "--student-data-fraction", "0.5"),
    "rewards, two iterations": (*SMALL, *MEASURED, "--reward-coef", "0.5", "--num-generations", "4",
                                "--num-iterations", "2"),
    "self, lora": (*SMALL, *MEASURED, "--lora.r", "4", "--learning-rate", "1e-3", "--teacher", "self",
                   "--teacher-prompt", "hints.shown", "--teacher-update-rate", "0.2"),
    "self, full, jsd": (*SMALL, *MEASURED, "--teacher", "self", "--teacher-prompt", "hints.shown", "--jsd-beta", "1",
                        "--teacher-update-rate", "0.2"),
}  # fmt: skip


SLOW = ("no rewards", "jsd, two iterations", "jsd, mini-batches", "self, full, jsd")  # other runs cover each


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in RUNS])
def test_a_resumed_run_equals_an_uninterrupted_run(name, tmp_path, monkeypatch):
    (tmp_path / "hints.py").write_text(HINTS)
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main([*RUNS[name], "--output-dir", str(whole)]) == 0
    rows = [row for row in metrics(whole) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["optim/grad_norm"] > 0 for row in rows)
    assert all(("policy/jsd" if "--jsd-beta" in RUNS[name] else "policy/reverse_kl") in row for row in rows)
    assert not {key for row in rows for key in row if describe(key) is None}
    if name == "no rewards":
        assert not {key for row in rows for key in row if key.startswith(("reward/", "eval/", "health/"))}
    if name.startswith("self"):
        assert not (whole / "checkpoints" / "step-00000004" / "teacher").exists()
    copy_as_if_killed(whole, broken, saved=2, logged=3)
    assert main(["--resume", "--output-dir", str(broken)]) == 0
    assert repeatable(metrics(broken)) == repeatable(metrics(whole))


def test_a_row_without_a_completion_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2="}\n')
    monkeypatch.chdir(tmp_path)
    assert main([*RUNS["given completions"], "--output-dir", str(tmp_path / "run")]) == 2
    assert "rows.jsonl:2: has no target" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
