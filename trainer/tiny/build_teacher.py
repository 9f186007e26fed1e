"""Rebuild builtin:tiny_teacher, the teacher of the distillation demo: an adapter of the tiny model, made by GRPO.

python -m trainer.tiny.build_teacher
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "teacher"
FILES = ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEMO = ("--method", "grpo", "--lora.r", "8", "--learning-rate", "2e-3")


def main() -> None:
    from trainer.__main__ import main as train

    if sys.argv[1:]:
        print(f"usage: python -m trainer.tiny.build_teacher\n\nRebuilds {HERE} in place, by the demo:\n"
              f"python -m trainer {' '.join(DEMO)}")  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as scratch:
        train([*DEMO, "--output-dir", str(Path(scratch) / "run")])
        made = Path(scratch) / "run" / "final"
        HERE.mkdir(exist_ok=True)
        for name in FILES:
            shutil.copyfile(made / name, HERE / name)
        settings = json.loads((made / "adapter_config.json").read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = "builtin:tiny"
    settings["target_modules"].sort()
    (HERE / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"rebuilt {HERE}")


if __name__ == "__main__":
    main()
