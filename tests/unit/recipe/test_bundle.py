"""The bundle of a recipe's modules."""

import io
import os
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.recipe.bundle import bundle


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path = path.with_suffix(".py") if not path.suffix else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory / "recipe.py"


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_it_holds_the_recipe_and_what_can_be_imported_beside_it(tmp_path: Path) -> None:
    recipe = write(tmp_path, recipe="import helper", helper="x = 1", data__notes="", checks__deep__a="")
    (tmp_path / "checks" / "__init__.py").touch()
    (tmp_path / "checks" / "deep" / "__init__.py").touch()
    (tmp_path / "README.md").write_text("not code")
    found = names(bundle(recipe))
    expected = ["checks/__init__.py", "checks/deep/__init__.py", "checks/deep/a.py", "helper.py", "recipe.py"]
    assert found == expected


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    one = write(tmp_path / "one", recipe="x = 1", a="", b="")
    two = write(tmp_path / "two", b="", a="", recipe="x = 1")
    os.utime(one, (1, 1))
    two.chmod(0o600)
    assert bundle(one) == bundle(two)
    two.write_text("x = 2")
    assert bundle(one) != bundle(two)


def test_a_directory_of_code_is_refused_with_a_hint(tmp_path: Path) -> None:
    recipe = write(tmp_path, recipe="")
    (tmp_path / "big.py").write_bytes(os.urandom(1_200_000))
    with pytest.raises(ConfigError, match=r"exceed 1024 KiB zipped; give the recipe a directory of its own"):
        bundle(recipe)


def test_a_package_that_links_to_itself_is_packed_once(tmp_path: Path) -> None:
    recipe = write(tmp_path, recipe="")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "__init__.py").touch()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    assert names(bundle(recipe)) == ["loop/__init__.py", "recipe.py"]


@pytest.mark.parametrize("name", ["my.recipe.py", "recipe.txt", "missing.py"])
def test_a_recipe_that_cannot_be_imported_is_refused(tmp_path: Path, name: str) -> None:
    if name != "missing.py":
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=name):
        bundle(tmp_path / name)
