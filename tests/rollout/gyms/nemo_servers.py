"""Run by a Python that has nemo-gym: its unmodified servers on loopback, as a tool of the assets starts them, and the
head server that tells where they are.

    STROP_NEMO_PYTHON tests/rollout/gyms/nemo_servers.py ASSETS/tools/nemo_gym_servers.py
"""

import asyncio
import importlib.util
import sys
import threading

import uvicorn
from nemo_gym import global_config
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import HeadServer


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("nemo_gym_servers", path)
    servers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)
    place = servers.CONFIG["head_server"]
    global_config._GLOBAL_CONFIG_DICT = servers.CONFIG
    app = HeadServer(config=BaseServerConfig(host=place["host"], port=place["port"])).setup_webserver()
    head = uvicorn.Server(uvicorn.Config(app, host=place["host"], port=place["port"], log_level="warning"))
    threading.Thread(target=head.run, daemon=True).start()
    asyncio.run(servers.main())


if __name__ == "__main__":
    main(sys.argv[1])
