"""What makes importing transformers, which mlx-lm needs for tokenizers, twice as fast.

transformers reads all of its 1,700 model files at each import, twice, to know which names there are in them. That
changes with another installation of it alone, so it is kept as a file from then on.
"""

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE, FUNCTION = "transformers.utils.import_utils", "define_import_structure"
Structure = dict[frozenset[str], dict[str, set[str]]]  # what is needed for which names of which modules


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the module with its function in place that looks through files."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        define = getattr(module, FUNCTION, None)
        if define is not None:
            from engine.model.store import default_home

            setattr(
                module, FUNCTION, kept(define, Path(self.path).parents[1] / "models", default_home() / "imports")
            )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """Have the next import of transformers be a fast one; harmless when it is imported already."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def kept(define: Callable[..., Structure], folder: Path, place: Path) -> Callable[..., Structure]:
    """`define`, whose result for `folder` is kept in the folder `place`, by when and where it was installed."""
    from engine.remembered import Remembered  # and with it MLX, which whoever imports transformers here has

    remembered, key = Remembered(place), ""
    with suppress(OSError):
        stamp = f"{folder} {(folder / '__init__.py').stat().st_mtime_ns}"
        key = hashlib.sha256(stamp.encode()).hexdigest()[:32]

    def defined(module_path: str | os.PathLike[str], prefix: str | None = None) -> Structure:
        if not key or folder not in (Path(module_path), Path(module_path).parent):
            return define(module_path, prefix=prefix)
        found = _structure(remembered.read(key))
        if found is None:
            found = define(folder)
            said = [
                (sorted(needs), {name: sorted(of) for name, of in names.items()}) for needs, names in found.items()
            ]
            remembered.keep(key, said)
        if prefix is None:
            return found
        return {needs: {f"{prefix}.{name}": of for name, of in names.items()} for needs, names in found.items()}

    return defined


def _structure(said: Any) -> Structure | None:
    """What was kept, or None: nothing was, or it is something else."""
    try:
        return {frozenset(needs): {name: set(of) for name, of in names.items()} for needs, names in said}
    except (ValueError, TypeError, AttributeError):
        return None
