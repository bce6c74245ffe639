"""A fault as one edit of one function of vLLM's, made from the source that is installed.

Nothing of vLLM's is copied here: an edit names a function, a piece of its text, and what stands
there instead. The text must occur exactly once, or the edit refuses: then this vLLM isn't the
one that the fault was written for. The clean twin goes the same way with the text left as it is, so
that it differs in that one place.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from kvroute.errors import UnknownVLLM


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes
    ----------
    number : the fault's, ``"L07"``.
    module, qualname : the function.
    old, new : its text, and what replaces it; whitespace at line ends and indents as in vLLM.
    helpers : names that ``new`` uses and vLLM's module lacks.

    """

    number: str
    module: str
    qualname: str
    old: str
    new: str
    helpers: Mapping[str, Any] = field(default_factory=dict)

    def plant(self, *, clean: bool = False) -> Callable[[], None]:
        """Put the edited function, or its clean twin, in place of vLLM's.

        Returns
        -------
        A function that takes it out again.

        Raises
        ------
        UnknownVLLM
            When the text isn't there exactly once.

        """
        module: Any = importlib.import_module(self.module)
        holder = module
        *outer, name = self.qualname.split(".")
        for part in outer:
            holder = getattr(holder, part)
        original = vars(holder)[name]
        plain = getattr(original, "__func__", original)
        edited = self._compile(plain, vars(module), clean=clean)
        replacement = type(original)(edited) if original is not plain else edited
        undo = [(holder, name, original)]
        setattr(holder, name, replacement)
        if not outer:  # other modules that imported the function by name
            for other in list(sys.modules.values()):
                namespace = getattr(other, "__dict__", None) or {}
                for alias in [a for a, v in list(namespace.items()) if v is original]:
                    undo.append((other, alias, original))
                    setattr(other, alias, replacement)

        def restore() -> None:
            for place, attribute, value in undo:
                setattr(place, attribute, value)

        return restore

    def _compile(self, function: FunctionType, names: dict[str, Any], *, clean: bool) -> Any:
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(self.old) != 1:
            raise UnknownVLLM(
                f"fault {self.number}: {self.module}.{self.qualname} has the text to be edited "
                f"{text.count(self.old)} times, expected once; this vLLM is not one it knows",
            )
        if not clean:
            text = text.replace(self.old, self.new)
        # Annotations name types that exist for type checkers only.
        text = "from __future__ import annotations\n" + text
        filename = f"<fault {self.number} {'clean' if clean else 'faulty'}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        code = compile(text, filename, "exec", dont_inherit=True)
        for helper, value in self.helpers.items():
            names.setdefault(helper, value)
        found: dict[str, Any] = {}
        exec(code, names, found)  # noqa: S102 - the installed vLLM's own source, edited above
        return found[function.__name__]
