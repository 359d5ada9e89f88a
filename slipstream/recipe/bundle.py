"""Packs the modules that a reward function needs, so that reward workers elsewhere can import them."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import ConfigError

MAX_BUNDLE_BYTES = 1024 * 1024

# Equal sources must give equal bytes, and so one blob; no file's date may come in.
_DATE = (1980, 1, 1, 0, 0, 0)


def bundle(recipe_path: Path) -> bytes:
    """Zip of a recipe, and of the modules and packages (directories with `__init__.py`) beside it.

    Raises:
        ConfigError: the recipe is missing, its name cannot be imported, or the zip exceeds MAX_BUNDLE_BYTES.
    """
    if not recipe_path.is_file():
        raise ConfigError(f"{recipe_path}: no such recipe file")
    if recipe_path.suffix != ".py" or "." in recipe_path.stem:
        raise ConfigError(f"{recipe_path}: a recipe's file name must be a module name and `.py`")
    directory = recipe_path.resolve().parent
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(_modules(directory)):
            info = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, path.read_bytes())
            if target.tell() > MAX_BUNDLE_BYTES:
                raise ConfigError(
                    f"{directory}: the Python modules beside {recipe_path.name} exceed "
                    f"{MAX_BUNDLE_BYTES // 1024} KiB zipped; give the recipe a directory of its own"
                )
    return target.getvalue()


def _modules(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink() and (path / "__init__.py").is_file():
            yield from _modules(path)
