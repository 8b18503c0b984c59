"""The reference, frozen: what it is may be called, never changed, and every change is noticed.

Digests of source text identify a reference in records and baselines (a stored figure of another
reference is not comparable); digests of parameters, buffers and flags notice a candidate that
edits its own judge while the tests run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fastlayer.code_reads import values_read

if TYPE_CHECKING:
    import torch

_SHA256 = re.compile(r"[0-9a-f]{64}")


class DigestError(RuntimeError):
    """A reference file is not the one that was pinned."""


class ReferenceLoadError(ValueError):
    """``path.py:ClassName`` does not lead to a class."""


class ReferenceMutatedError(RuntimeError):
    """The frozen reference was changed after it was frozen."""


def digest_file(path: str | Path) -> str:
    """sha256 of the file's bytes, as ``sha256sum`` prints it."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def check_pinned(path: str | Path, expected_sha256: str) -> str:
    """The file's digest, if it is the pinned one.

    Raises DigestError otherwise, saying how to accept a change and how to undo it.
    """
    if not _SHA256.fullmatch(expected_sha256):
        raise DigestError(
            f"the pinned digest of {path} is {expected_sha256!r}: expected 64 lower-case "
            'hexadecimal digits, as fastlayer_pins = ["<file> <sha256>"] in pytest\'s ini options'
        )
    if not Path(path).is_file():
        raise DigestError(f"the pinned reference {path} does not exist: restore the file")
    actual = digest_file(path)
    if actual != expected_sha256:
        raise DigestError(
            f"the reference {path} has sha256\n  {actual}\n"
            f"but fastlayer_pins in pytest's ini options has\n  {expected_sha256}\n"
            "Every stored figure was measured against the pinned file. To undo the change: "
            f"git checkout -- {path}\n"
            f'To accept it, put "{path} {actual}" there\n'
            "and measure the baselines again: the stored ones become STALE_BASELINE."
        )
    return actual


def load_reference(spec: str) -> type:
    """The class named by ``path.py:ClassName``.

    Raises ReferenceLoadError for a malformed spec, a missing file, or a missing class (naming
    the classes the file does define). Errors of the file itself are not caught.
    """
    path_text, separator, name = spec.rpartition(":")
    path = Path(path_text).expanduser()
    if not separator or not name.isidentifier() or path.suffix != ".py":
        raise ReferenceLoadError(f"reference {spec!r}: expected path/to/file.py:ClassName")
    if not path.is_file():
        raise ReferenceLoadError(f"reference {spec!r}: there is no file {path.resolve()}")
    module_name = f"_fastlayer_reference_{digest_file(path)[:16]}"
    module = sys.modules.get(module_name)
    if module is None:
        located = importlib.util.spec_from_file_location(module_name, path)
        if located is None or located.loader is None:
            raise ReferenceLoadError(f"reference {spec!r}: {path} cannot be imported")
        module = importlib.util.module_from_spec(located)
        sys.modules[module_name] = module  # before exec: dataclasses look their module up
        try:
            located.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module_name
        )
        raise ReferenceLoadError(
            f"reference {spec!r}: {path} defines no class {name}; it defines "
            f"{', '.join(classes) or 'none'}"
        )
    return found


def _code_owner(target: object) -> Any:
    """The function or class whose source says what the callable computes."""
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target) if callable(target) else target
    if inspect.ismethod(target):
        return target.__func__
    if inspect.isroutine(target) or isinstance(target, type):
        return target
    return type(target)


def digest_callable(target: object) -> str:
    """sha256 of the callable's source text, or of its qualified name.

    The name serves where there is no source (builtins) and where the source belongs to an
    installed library: a new release of torch is a change of software, recorded as such, and does
    not make ``torch.nn.LayerNorm`` another reference.
    """
    owner = _code_owner(target)
    module = getattr(owner, "__module__", None) or ""
    name = f"{module}.{getattr(owner, '__qualname__', repr(owner))}"
    try:
        file = inspect.getsourcefile(owner) or ""
        text = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        file, text = "", name
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        text = name
    return hashlib.sha256(text.encode()).hexdigest()


def held_objects(target: object) -> Iterator[object]:
    """Objects a callable holds: itself, ``self``, partial arguments, closure cells, globals.

    Globals are only those its own code names. Not recursive into containers of containers: this
    finds the modules and tensors of ordinary code, not of code that hides them.
    """
    yield target
    if isinstance(target, functools.partial):
        yield from target.args
        yield from target.keywords.values()
        yield from held_objects(target.func)
        return
    if inspect.ismethod(target):
        yield from held_objects(target.__self__)
        target = target.__func__
    if inspect.isfunction(target):
        for cell in target.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell not filled yet
                continue
        yield from target.__defaults__ or ()
        names = target.__code__.co_names
        yield from (target.__globals__[n] for n in names if n in target.__globals__)
    elif not isinstance(target, type) and hasattr(target, "__dict__"):
        yield from vars(target).values()


def held_modules(target: object) -> list[torch.nn.Module]:
    """The torch modules among ``held_objects``, each once."""
    import torch

    found: dict[int, torch.nn.Module] = {}
    for one in held_objects(target):
        if isinstance(one, torch.nn.Module):
            found.setdefault(id(one), one)
    return list(found.values())


def held_tensors(target: object) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors among ``held_objects``, by a name for the messages."""
    import torch

    found = _module_tensors(target, held_modules(target))
    loose = [one for one in held_objects(target) if isinstance(one, torch.Tensor)]
    found.update({f"tensor#{i}": tensor for i, tensor in enumerate(loose)})
    return found


def _module_tensors(target: object, modules: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for m, module in enumerate(modules):
        prefix = "" if module is target else f"{type(module).__name__}#{m}."
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[prefix + name] = tensor
    return found


class FrozenReference:
    """A callable that evaluates the reference without gradients and can prove it is unchanged.

    A module is put in eval mode. ``sha256`` is the digest of ``source`` (a file) where given,
    else of the callable's own source text; ``target`` is the callable that was frozen.
    """

    def __init__(self, target: Callable[..., Any], *, source: str | Path | None = None) -> None:
        import torch

        if not callable(target):
            raise TypeError(f"reference is {type(target).__name__}: expected a callable or module")
        if isinstance(target, torch.nn.Module):
            target.eval()
        self.target = target
        self.source = None if source is None else Path(source)
        self.sha256 = self._digest()
        self._state = self._snapshot()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            return self.target(*args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"FrozenReference({_code_owner(self.target).__qualname__}, sha256={self.sha256[:12]})"
        )

    def changes(self) -> list[str]:
        """What differs from the moment of freezing, one phrase each; empty if nothing."""
        found = []
        if self._digest() != self.sha256:
            found.append(f"source {self.source or 'text'} has another sha256")
        now = self._snapshot()
        for key in sorted(self._state.keys() | now.keys()):
            before, after = self._state.get(key), now.get(key)
            if before is None:
                found.append(f"{key} was added")
            elif after is None:
                found.append(f"{key} was removed")
            elif before != after:
                found.append(f"{key} changed")
        return found

    def verify(self) -> None:
        """Raise ReferenceMutatedError if its source, tensors, flags or what it reads changed."""
        found = self.changes()
        if found:
            more = f", and {len(found) - 5} more" if len(found) > 5 else ""
            raise ReferenceMutatedError(
                f"{self!r} was changed after it was frozen: {', '.join(found[:5])}{more}. "
                "A reference is only ever read: give the candidate its own copies"
            )

    def _digest(self) -> str:
        return digest_callable(self.target) if self.source is None else digest_file(self.source)

    def _snapshot(self) -> dict[str, object]:
        """Everything that decides outputs and cost: values, flags, code, what the code reads."""
        from pytest_fastlayer.fingerprint import fingerprint

        modules = held_modules(self.target)
        held = _module_tensors(self.target, modules)
        state = values_read(self.target, {id(tensor) for tensor in held.values()})
        for name, tensor in held.items():
            state[f"the value of {name}"] = fingerprint(tensor)
            state[f"requires_grad of {name}"] = tensor.requires_grad
        for m, module in enumerate(modules):
            for name, child in module.named_modules():
                where = f"{name or type(child).__name__}" + (f"#{m}" if m else "")
                state[f"the training flag of {where}"] = child.training
                state[f"the forward code of {where}"] = _code_of(child)
                state[f"the hooks of {where}"] = _hooks_of(child)
        code = getattr(_code_owner(self.target), "__code__", None)
        if code is not None:
            state["its code"] = code
        return state


def _code_of(module: torch.nn.Module) -> object:
    forward = module.__dict__.get("forward", type(module).forward)
    return getattr(forward, "__code__", forward)


def _hooks_of(module: torch.nn.Module) -> tuple[int, ...]:
    return tuple(
        len(getattr(module, name))
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def freeze(
    reference: Callable[..., Any] | FrozenReference, *, source: str | Path | None = None
) -> FrozenReference:
    """Freeze a module or callable; freezing a FrozenReference again returns it as it is."""
    if isinstance(reference, FrozenReference):
        return reference
    return FrozenReference(reference, source=source)
