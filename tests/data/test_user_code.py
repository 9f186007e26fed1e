"""Modules in the user's folder: imported once, and never replacing a module that is in use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data.user_code import attribute_of, describe_error, import_beside, is_missing, load_file, load_module, where_raised


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_module_is_imported_once_under_its_own_name(here):
    (here / "once_only.py").write_text("values = []\n")
    module = load_module("once_only", "x=once_only.fn")
    module.values.append(1)
    assert sys.modules["once_only"] is module
    assert load_module("once_only", "x=once_only.fn").values == [1]
    import once_only

    assert once_only is module


def test_another_working_folder_has_another_module(here, monkeypatch):
    for folder in ("one", "two"):
        for name in ("plain_mod.py", "with_init/__init__.py", "with_init/part.py", "bare_folder/part.py"):
            path = here / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"here = {folder!r}\n")
    for folder in ("one", "two", "one"):
        monkeypatch.chdir(here / folder)
        for name in ("plain_mod", "with_init", "with_init.part", "bare_folder.part"):
            assert import_beside(name).here == folder, name


def test_a_name_in_use_is_not_replaced(here):
    (here / "json.py").write_text("mine = True\n")
    (here / "data.py").write_text("mine = True\n")
    before = sys.modules["json"], sys.modules["data"]
    for name in ("json", "data"):
        assert import_beside(name).mine and import_beside(name) is import_beside(name)
    assert (sys.modules["json"], sys.modules["data"]) == before
    assert hasattr(import_beside("data.user_code"), "import_beside"), "a part of the package, not of the file"


def test_a_package_wins_over_a_file_of_its_name_as_in_python(here):
    (here / "both_of").mkdir()
    (here / "both_of" / "__init__.py").write_text("kind = 'package'\n")
    (here / "both_of.py").write_text("kind = 'file'\n")
    assert import_beside("both_of").kind == "package"


def test_error_messages(here):
    (here / "fine_mod.py").write_text("from pathlib import Path\ndef shorten(): ...\n")
    (here / "needs_mod.py").write_text("\nimport absent_package\n")
    (here / "exits_mod.py").write_text("import sys\nsys.exit('usage')\n")
    for name, message in {
        "nowhere_mod": f"x=y: no module 'nowhere_mod' in {here} or installed",
        "fine_mod.deep": f"x=y: no module 'fine_mod.deep' in {here} or installed",
        "needs_mod": "x=y: .*ModuleNotFoundError: No module named 'absent_package' .needs_mod.py, line 2.",
        "exits_mod": "x=y: .*SystemExit: usage .exits_mod.py, line 2.",
    }.items():
        for _ in range(2):  # a failed import can be repeated
            with pytest.raises(ValueError, match=message) as caught:
                load_module(name, "x=y")
            assert caught.value.__suppress_context__
    with pytest.raises(ValueError, match="x=y: .*fine_mod.py has no 'shortn'; did you mean 'shorten'. .shorten.$"):
        attribute_of(load_module("fine_mod", "x=y"), "shortn", "x=y")
    with pytest.raises(ValueError, match="x=y: sys has no 'no_such_thing'"):  # a builtin module has no file
        attribute_of(sys, "no_such_thing", "x=y")
    with pytest.raises(ValueError, match="x=y: the file .*gone.py does not exist"):
        load_file(here / "gone.py", "x=y")
    for _ in range(2):
        with pytest.raises(ValueError, match="x=y: .*SystemExit: usage .exits_mod.py, line 2."):
            load_file(here / "exits_mod.py", "x=y")


def test_missing_is_distinguished_from_broken(here):
    (here / "imports_absent.py").write_text("import absent_package\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        import_beside("imports_absent")
    assert not is_missing("imports_absent", caught.value)
    with pytest.raises(ModuleNotFoundError) as caught:
        import_beside("absent_package.deep.module")
    assert is_missing("absent_package.deep.module", caught.value)


def test_describe_error_and_where_raised():
    try:
        raise KeyError("two\nlines")
    except KeyError as error:
        assert describe_error(error) == "KeyError: 'two\\nlines'"
        assert where_raised(error).startswith(f" ({Path(__file__).name}, line ")
    assert where_raised(ValueError("never raised")) == ""
