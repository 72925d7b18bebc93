"""Classes whose methods ``torch.compile`` calls and does not trace.

Dynamo breaks its graph at a method of a process group. In torch's own groups that method is C++. A method in
Python would be compiled next, which fails: a process group is opaque to Dynamo and has only the attributes
that torch has registered.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# The method itself, and what it calls. torch.compiler.disable says the same, but imports Dynamo, for seconds.
_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

_Class = TypeVar("_Class", bound=type)


def untraced(cls: _Class) -> _Class:
    """Let ``torch.compile`` run the public methods that a class defines as they are."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType) and not method.__name__.startswith("_"):
            set_code_exec_strategy(method.__code__, _AS_IT_IS)
            vars(method)["_torchdynamo_disable"] = True  # nor inlined into the graph of who calls it
    return cls
