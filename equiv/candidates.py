"""Find a candidate by name, or by ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equiv.errors import UsageError
from equiv.execute import Loaded
from equiv.guards import compiled_frames, global_state

if TYPE_CHECKING:
    from equiv.pairs import OpPair


def is_own(name: str) -> bool:
    """Whether a candidate's name is somebody's ``module:function``."""
    return ":" in name


def check_name(pair: OpPair, name: str) -> None:
    """Check that a name can be a candidate of the pair, without importing it.

    Raises
    ------
    UsageError : with the known names.

    """
    if not is_own(name) and name not in pair.candidates:
        msg = (
            f"unknown candidate {name!r}: pair {pair.name} has {', '.join(pair.candidates)}; "
            "your own kernel is module:function or file.py:function"
        )
        raise UsageError(msg)


def import_function(name: str) -> Any:
    """Import ``module:function`` (the working folder is on the path) or ``file.py:function``.

    Raises
    ------
    UsageError : what couldn't be imported, and why.

    """
    where, _, attribute = name.rpartition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                msg = f"candidate {name!r}: there is no file {where}"
                raise UsageError(msg)
            called = module_name(path)
            spec = importlib.util.spec_from_file_location(called, path)
            if spec is None or spec.loader is None:
                msg = f"candidate {name!r}: {where} isn't a Python file"
                raise UsageError(msg)
            sys.path.insert(0, str(path.parent))
            module = importlib.util.module_from_spec(spec)
            sys.modules[called] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except UsageError:
        raise
    except BaseException as e:  # whatever somebody's module does while it is imported
        if isinstance(e, KeyboardInterrupt):
            raise
        what = f"{type(e).__name__}: {' '.join(str(e).split())}"
        msg = f"candidate {name!r} can't be imported: {what}"
        raise UsageError(msg) from e
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        what = "isn't callable" if found is not None else "doesn't exist"
        msg = f"candidate {name!r}: {attribute} {what} in {where}"
        raise UsageError(msg)
    return found


SOURCES = (".py", ".toml", ".so", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp", ".ptx", ".cubin")
"""Files of a package that say what a kernel in it does."""


def source_sha256(name: str) -> str:
    """Return the SHA-256 of what somebody's own kernel was imported from.

    That is the file of a module that stands alone, and the sources in the folder of one in a
    package, by name and content. Empty for a candidate of the pair, and where there is no file.
    """
    if not is_own(name):
        return ""
    where = name.rpartition(":")[0]
    file_name, package = (where, "") if where.endswith(".py") else _found(where)
    path = Path(file_name)
    if not path.is_file():
        return ""
    whole = hashlib.sha256()
    inside = bool(package)
    for file in sorted(path.parent.iterdir()) if inside else (path,):
        if file.is_file() and (file.suffix in SOURCES or not inside):
            whole.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _found(module: str) -> tuple[str, str]:
    """Return a module's file and its package, imported or not; both empty where there is none."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "", getattr(loaded, "__package__", None) or ""
    spec = None
    with contextlib.suppress(Exception):  # whatever a package above it does while it is imported
        spec = importlib.util.find_spec(module)
    return (spec.origin or "", spec.parent or "") if spec else ("", "")


def module_name(path: Path) -> str:
    """Return the name under which a file is imported: its own, unless another module has that.

    A kernel in a file called ``torch.py`` or ``kvpack.py`` doesn't stand in for those.
    """
    other = None
    if path.stem.isidentifier():
        with contextlib.suppress(ImportError, ValueError):
            other = importlib.util.find_spec(path.stem)
    taken = other is not None and other.origin != str(path)
    return f"candidate_{path.stem}" if taken else path.stem


def load(pair: OpPair, name: str, device: str, library: str | None) -> Loaded:
    """Load a candidate in this process.

    Raises
    ------
    UsageError : unknown, or can't be imported.
    RuntimeError : of a class ``Unavailable``: a candidate of the pair that can't run here.

    """
    check_name(pair, name)
    state, frames = global_state(), compiled_frames()
    if is_own(name):
        loaded = Loaded(name, import_function(name), "dispatch", state=state)
    else:
        known = pair.candidates[name]
        kernel = known.load(device, library if known.takes_library else None)
        loaded = Loaded(name, kernel, known.guard, known.executions, known.evidence)
    if loaded.guard == "dispatch" and compiled_frames() > frames:
        return replace(loaded, guard="malloc")  # compiled while it was loaded
    return loaded
