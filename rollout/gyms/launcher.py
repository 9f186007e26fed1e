"""Run in the gym's Python, started by auto_start.py; imports nothing from the project.

    python launcher.py parse '{"config_paths": [...]}'     # print {"root": its folder, "config": its merged files}
    python launcher.py serve FOLDER app.py                 # run one server of the gym until it is stopped

`serve` runs the server's file like the gym's runner, with the configuration in NEMO_GYM_CONFIG_DICT and the server's
name in NEMO_GYM_CONFIG_PATH, but without ray, which would listen on every interface of the machine.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def parse(config: str) -> None:
    from nemo_gym import PARENT_DIR
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from omegaconf import OmegaConf

    settings = GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(json.loads(config)), skip_load_from_cli=True
    )
    tree = GlobalConfigDictParser().parse(settings)
    print(json.dumps({"root": str(PARENT_DIR), "config": OmegaConf.to_container(tree, resolve=True)}))


def serve(folder: str, entrypoint: str) -> None:
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a server's first use of ray fails instead of starting it
    from nemo_gym import server_utils

    server_utils.initialize_ray = lambda: None
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [entrypoint]
    runpy.run_path(entrypoint, run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose nemo_gym.py would shadow the gym's package
    {"parse": parse, "serve": serve}[sys.argv[1]](*sys.argv[2:])
