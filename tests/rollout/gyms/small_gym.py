"""A folder that looks like a clone of NeMo Gym to rollout/gyms/launcher.py: its package, servers and a .venv.

    folder = make_gym(tmp_path / "Gym")
    NemoGymConfig(dir=str(folder), auto_start=True, config_paths=("configs/all.yaml",), datasets=(...))

A server verifies 1.0 if the row's answer is in the completion, and shows its configuration at /config. The field
`behaves` of a server's configuration makes it fail.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

FILES = {
    "omegaconf.py": """
class OmegaConf:
    create = staticmethod(lambda tree: tree)
    to_container = staticmethod(lambda tree, resolve: tree)
""",
    "nemo_gym/__init__.py": """
from pathlib import Path
PARENT_DIR = Path(__file__).parents[1]
""",
    "nemo_gym/global_config.py": """
import yaml
class GlobalConfigDictParserConfig:
    def __init__(self, *, initial_global_config_dict, skip_load_from_cli):
        self.given = initial_global_config_dict
class GlobalConfigDictParser:
    def parse(self, settings):
        tree = dict(settings.given)
        text = "".join(open(path).read() for path in tree["config_paths"])
        for name, value in tree.items():
            text = text.replace("${" + name + "}", str(value))
        print("the gym prints this first")
        tree = tree | yaml.safe_load(text)
        if "refused" in tree:
            raise ValueError("no server of that kind")
        return tree
""",
    "nemo_gym/server_utils.py": """
import json, os, socket, time, yaml
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
def initialize_ray():
    raise AssertionError("ray is started")
def run():
    initialize_ray()
    tree = yaml.safe_load(os.environ["NEMO_GYM_CONFIG_DICT"])
    name = os.environ["NEMO_GYM_CONFIG_PATH"]
    ((fields,),) = [list(inner.values()) for inner in tree[name].values()]
    behaves = fields.get("behaves")
    if behaves == "dies":
        raise ModuleNotFoundError("No module named 'puzzles'")
    if behaves == "hangs":
        print("loading the puzzles", flush=True)
        time.sleep(60)
    if behaves == "port":
        print("ERROR:    [Errno 98] error while attempting to bind on address: address already in use", flush=True)
        print("INFO:     Application shutdown complete.", flush=True)
        raise SystemExit(1)
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *_):
            pass
        def reply(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            shown = {"config": tree, "environ": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}
            self.reply(shown if self.path == "/config" else {"status": "ok"})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = json.dumps(body.get("response", {}))
            self.reply({"reward": float(body["answer"] in said)} if self.path == "/verify" else {})
    ThreadingHTTPServer((fields["host"], fields["port"]), Handler).serve_forever()
""",
}
APP = """
from nemo_gym.server_utils import run
if __name__ == "__main__":
    run()
"""


def make_gym(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for place in ("resources_servers/sums", "responses_api_agents/simple_agent", "responses_api_models/vllm_model"):
        (folder / place).mkdir(parents=True)
        (folder / place / "app.py").write_text(APP)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    write_config(folder)
    return folder


def write_config(folder: Path, name: str = "configs/all.yaml", *, model: bool = True, **fields: Any) -> str:
    """Two resource servers and an agent for the first; `fields` are more of the first one's."""
    sums = {"entrypoint": "app.py", "host": "0.0.0.0", "num_workers": 4, **fields}
    tree = {
        "sums": {"resources_servers": {"sums": sums}},
        "others": {"resources_servers": {"sums": {"entrypoint": "app.py"}}},
        "sums_agent": {"responses_api_agents": {"simple_agent": {
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": "sums"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }}},
    }  # fmt: skip
    if model:
        proxy = {"entrypoint": "app.py", "base_url": "${policy_base_url}", "return_token_id_information": False}
        tree["policy_model"] = {"responses_api_models": {"vllm_model": proxy}}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(tree))
    return name
