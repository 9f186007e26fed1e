"""A config as a YAML file: read with the safe loader, errors with their line, written so that --config reruns it.

segments.yaml contains the settings that resumes changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from data.limits import input_limit

Earlier = dict[str, list[tuple[int, str]]]  # (last step, value) of each earlier value, by setting

SEGMENTS = "segments.yaml"  # in a run folder, if a resume changed settings
NODES = "STROP_MAX_YAML_NODES"
PER_CALL = ("resume", "overwrite_output_dir")  # flags of one call, not settings of the run


class _Loader(yaml.SafeLoader):
    """Loader with limits: a duplicate key is an error (PyYAML would silently take the last), as are too many nodes.

    Each use of an alias counts as all nodes of its anchor: ten lines of aliases can stand for a billion nodes.
    """

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self.num_nodes
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            self.num_nodes += getattr(
                node, "num_nodes", input_limit(NODES)
            )  # no attribute yet: the anchor contains itself
        self.num_nodes += 1
        if self.num_nodes > input_limit(NODES):
            problem = f"more than {input_limit(NODES):,.0f} nodes, or an alias of itself; use fewer, or set {NODES}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if not isinstance(event, yaml.AliasEvent):
            node.num_nodes = self.num_nodes - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((i for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            mark = node.value[twice][0].start_mark
            raise yaml.MarkedYAMLError(problem=f"key {keys[twice]} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def load_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a config file; {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; a config is a YAML file") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply to be read; a config has two levels") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{line}: {problem or error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a mapping of settings; write lines such as learning_rate: 1e-6")
    return tree


def save_config(path: Path, tree: dict[str, Any]) -> None:
    """Write a config that --config PATH can run again; atomic, as a killed run must stay resumable."""
    kept = {key: value for key, value in tree.items() if key not in PER_CALL}
    scratch = path.with_name(f".tmp-{path.name}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(to_yaml(kept))
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def to_yaml(tree: dict[str, Any]) -> str:
    readable = r"\x85" not in repr(tree)  # PyYAML writes that line break unescaped, and reads it back as a space
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=readable, width=100)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield each setting as (flag name, text)."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", " ".join(str(item) for item in value) or "none"
        else:
            yield f"{prefix}{key}", "none" if value is None else str(value)


def read_segments(run_dir: Path) -> dict[int, dict[str, str]]:
    """Return flattened settings by the step after which they applied: all of them at 0, then only the changed ones."""
    path = run_dir / SEGMENTS
    segments: dict[Any, Any] = load_config(path) if path.is_file() else {}
    if not all(isinstance(step, int) and isinstance(changed, dict) for step, changed in segments.items()):
        raise UserError(f"{path}: not a mapping of steps to settings; delete the file to lose only this history")
    return segments


def earlier_settings(run_dir: Path) -> Earlier:
    """Return the earlier values of the settings that resumes changed."""
    earlier: Earlier = {}
    settings: dict[str, str] = {}
    for step, changed in read_segments(run_dir).items():
        for key in changed if settings else ():
            earlier.setdefault(key, []).append((step, settings.get(key, "none")))
        settings |= changed
    return earlier
