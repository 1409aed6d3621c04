"""Hooks on the job's objects that get in nobody's way: in a copy of an object they do nothing.

Loops copy what they train: ``copy.deepcopy(model)``, ``torch.save(model)``, a process that is spawned with the model as
an argument. torch copies hooks with the object they are on. Ours refer to threads and sockets, so a copy gets a
function of Python's own instead, which takes anything and returns None; a saved file needs no holdfast to be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.jit._recursive
from torch.utils.hooks import RemovableHandle


class Hook:
    """A hook that calls `call`, and that drops out of copies and pickles of whatever it is on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class Method:
    """Stands for a method of one object, in that object's attributes. In a copy of the object it is the copy's own."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        # The copy has no attributes yet when this is called for it, so it is the method of its class that is found.
        return getattr, (self._owner, self._name)


class Hooks(OrderedDict[int, Any]):
    """Stands for a module's dict of hooks, and leaves ours out of copies. So a saved module holds nothing that
    ``torch.load`` does not take with ``weights_only=True``, its default."""

    def __reduce__(self) -> Any:
        others = [(key, hook) for key, hook in self.items() if not isinstance(hook, Hook)]
        return OrderedDict, (), None, None, iter(others)


def on_gradient(parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call `call` with each gradient of a parameter before it is added. Returns what takes the hook off again.

    A backward that runs in a compiled function must call it, not trace into it.
    """
    undo: Callable[[], None] = parameter.register_hook(torch.compiler.disable(call)).remove  # type: ignore[no-untyped-call]
    return undo


def on_added_gradient(parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call `call` with a parameter once a gradient was added to its own: not for those that ``torch.autograd.grad``
    returns. Otherwise as `on_gradient`."""
    hooked = parameter.register_post_accumulate_grad_hook(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
    undo: Callable[[], None] = hooked.remove
    return undo


def replaced(owner: Any, name: str, value: object) -> Callable[[], None]:
    """Replace an attribute, or a class's for this one object. Returns what puts the earlier one back."""
    earlier = vars(owner).get(name)
    setattr(owner, name, value)
    return partial(delattr, owner, name) if earlier is None else partial(setattr, owner, name, earlier)


DICTS = ("_forward_pre_hooks", "_forward_hooks")


class ForwardHooks:
    """Calls `before` and `after` around the forward of `modules`, until `remove`.

    ``torch.jit.script`` compiles the hooks that are on a module, which ours cannot be: they are taken off meanwhile.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], before: Callable[..., Any], after: Callable[..., Any]
    ) -> None:
        self._modules = modules
        self._before, self._after = Hook(before), Hook(after)
        self._handles: list[RemovableHandle] = []
        self._put_on()
        self._script: Callable[..., Any] = torch.jit._recursive.create_script_module
        self._undo = replaced(torch.jit._recursive, "create_script_module", self._scripted)

    def remove(self) -> None:
        """Take them off again, for good: what others had replaced since then may still call `_scripted`."""
        self._undo()
        self._take_off()
        self._modules = ()

    def _put_on(self) -> None:
        module = torch.nn.Module  # its methods take compiled modules, too, whose own ones refuse
        for each in self._modules:
            for name in DICTS:  # one with hooks in it stays: their handles know it
                if type(held := vars(each).get(name)) is OrderedDict and not held:
                    vars(each)[name] = Hooks()
            self._handles += [
                module.register_forward_pre_hook(each, self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(each, self._after, always_call=True),
            ]

    def _take_off(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _scripted(self, *args: Any, **kwargs: Any) -> Any:
        self._take_off()
        try:
            return self._script(*args, **kwargs)
        finally:
            self._put_on()
