"""Describes the servers' optimizers, and begins the operations on the tensors that servers keep.

The kernels are those of :mod:`shoal.optim`. What depends on the norm of a whole tensor (the ratios of LAMB,
LANS and LARS, NovoGrad's running norm) is decided here, on every worker alike, by the functions that the
kernels of workers use; servers get the result. csrc/engine/served_weights.h describes the operations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal import native
from shoal.comm.engine import Operation
from shoal.errors import UsageError
from shoal.optim.adafactor import Adafactor, is_factored, share_of
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.moments import clip_factor
from shoal.optim.novograd import Novograd
from shoal.optim.sgd import SGD

# ---- the servers' optimizers ----------------------------------------------------------------------------

Group = Mapping[str, Any]
Totals = tuple[float, float, float]
"""Sums of squares of a tensor: gradients, weights, and what the optimizer also needs."""


@dataclass(frozen=True)
class Kernel:
    """An optimizer as the servers know it.

    Attributes:
        name: of the optimizer in the core (``SERVED_OPTIMIZERS``).
        state: names of the state's tensors, in the slots after the weights.
        counts: whether the state has a ``step``.
        has_norm: whether the state has a squared norm of the gradient, one number, which workers keep.
        options: returns the six numbers of a group that servers need.
        decide: returns the coefficients of a tensor's step from its norms; ``None`` if it needs no norms.
        prepare: returns the coefficients with which a tensor is measured, from the norm of its gradient and
            the factor of all gradients; ``None`` if the latter is all.
    """

    name: str
    state: tuple[str, ...]
    counts: bool
    options: Callable[[Optimizer, Group], tuple[float, ...]]
    decide: Callable[[Optimizer, Group, Totals, Table], list[float]] | None = None
    has_norm: bool = False
    prepare: Callable[[Group, Totals, Table, float], list[float]] | None = None


def kernel_of(optimizer: Optimizer) -> Kernel:
    """Return the kernel of an optimizer that ``rules.check_optimizer`` has accepted."""
    return KERNELS[type(optimizer)]


def options_of(optimizer: Optimizer) -> list[tuple[float, ...]]:
    """Return six numbers for each group, as csrc/engine/served_weights.h describes them."""
    options = KERNELS[type(optimizer)].options
    return [tuple(map(float, options(optimizer, group))) for group in optimizer.param_groups]


def factor_of(optimizer: Optimizer, norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this norm to the optimizer's own limit or ``max_norm``."""
    own = optimizer.max_grad_norm if isinstance(optimizer, Lamb) else None
    return 1.0 / max(1.0, norm / own) if own is not None else clip_factor(norm, max_norm)


def values_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of all groups by name, as JSON can hold them."""
    return [
        {name: _as_json(group[name]) for name in _NAMES if group.get(name) is not None}
        for group in optimizer.param_groups
    ]


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return float(value) if isinstance(value, Tensor) else value


def set_values(optimizer: Optimizer, values: list[dict[str, Any]]) -> None:
    """Set the options that :func:`values_of` has returned on another rank."""
    for group, options in zip(optimizer.param_groups, values, strict=True):
        for name, value in options.items():
            group[name] = tuple(value) if isinstance(value, list) else value


def describe(optimizer: Optimizer, num_tensors: int) -> str:
    """Return the options of all groups, which must be equal on all ranks, for messages."""
    own = {name: value for name in _NAMES if (value := getattr(optimizer, name, None)) is not None}
    every = [{**own, **group} for group in optimizer.param_groups]
    groups = (", ".join(f"{name}={each[name]}" for name in _NAMES if name in each) for each in every)
    return f"{type(optimizer).__name__}({'; '.join(groups)}) of {num_tensors} tensors"


_NAMES = (
    *("lr", "betas", "eps", "momentum", "nesterov", "weight_decay", "eta", "trust_ratio", "form"),
    *("bias_correction", "grad_averaging", "init_zero", "reg_inside_moment", "max_grad_norm"),
    *("eps1", "min_factored_size"),
)


def _sgd_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    nesterov = group.get("nesterov", getattr(optimizer, "nesterov", False))
    return group["lr"], group["momentum"], group["weight_decay"], nesterov, 0.0, 0.0


def _adam_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    corrects = group.get("bias_correction", False)  # LAMB's
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"], corrects


def _lars_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    return group["weight_decay"], 0.0, 0.0, 0.0, 0.0, 0.0


def _adafactor_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    return group["eps1"], 0.0, 0.0, 0.0, 0.0, 0.0


def _no_options(optimizer: Optimizer, group: Group) -> tuple[float, ...]:
    return (0.0,) * 6


def _decide_lamb(optimizer: Optimizer, group: Group, totals: Totals, table: Table) -> list[float]:
    decided: list[float] = native.core().lamb_coefficients(
        totals, learning_rate=group["lr"], trust_ratio=group["trust_ratio"]
    )
    return decided


def _prepare_lans(group: Group, totals: Totals, table: Table, factor: float) -> list[float]:
    return [native.core().lans_grad_scale(totals, grad_scale=factor, eps=group["eps"])]


def _decide_lans(optimizer: Optimizer, group: Group, totals: Totals, table: Table) -> list[float]:
    decided: list[float] = native.core().lans_coefficients(
        totals, learning_rate=group["lr"], beta1=group["betas"][0]
    )
    return decided


def _prepare_adafactor(group: Group, totals: Totals, table: Table, factor: float) -> list[float]:
    return [factor, share_of(table.step + 1)]


def _decide_adafactor(optimizer: Optimizer, group: Group, totals: Totals, table: Table) -> list[float]:
    decided: list[float] = native.core().adafactor_coefficients(
        totals, table.parameter.numel(), learning_rate=group["lr"], weight_decay=group["weight_decay"]
    )
    return decided


def _decide_lars(optimizer: Optimizer, group: Group, totals: Totals, table: Table) -> list[float]:
    assert isinstance(optimizer, Lars)
    decided: list[float] = native.core().lars_coefficients(
        totals, learning_rate=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"],
        eta=group["eta"], eps=group["eps"], clips=optimizer.form == "larc", nesterov=optimizer.nesterov,
        trust_ratio=group["trust_ratio"],
    )  # fmt: skip
    return decided


def _decide_novograd(optimizer: Optimizer, group: Group, totals: Totals, table: Table) -> list[float]:
    beta1, beta2 = group["betas"]
    names = ("eps", "weight_decay", "bias_correction", "grad_averaging", "init_zero", "reg_inside_moment")
    decided: list[float]
    decided, table.norm_sq = native.core().novograd_coefficients(
        totals, table.norm_sq, float(table.step + 1), learning_rate=group["lr"], beta1=beta1, beta2=beta2,
        **{name: group[name] for name in names},
    )  # fmt: skip
    return decided


_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
KERNELS: dict[type[Optimizer], Kernel] = {
    SGD: Kernel("sgd", _MOMENTUM, False, _sgd_options),
    torch.optim.SGD: Kernel("sgd", _MOMENTUM, False, _sgd_options),
    AdamW: Kernel("adamw", _MOMENTS, True, _adam_options),
    torch.optim.AdamW: Kernel("adamw", _MOMENTS, True, _adam_options),
    Lamb: Kernel("lamb", _MOMENTS, True, _adam_options, _decide_lamb),
    Lans: Kernel("lans", _MOMENTS, True, _adam_options, _decide_lans, prepare=_prepare_lans),
    Lars: Kernel("lars", _MOMENTUM, False, _lars_options, _decide_lars),
    Novograd: Kernel("novograd", ("exp_avg",), True, _no_options, _decide_novograd, has_norm=True),
    Adafactor: Kernel(
        "adafactor", ("variance",), True, _adafactor_options, _decide_adafactor, prepare=_prepare_adafactor
    ),
}
"""By class: the optimizers that servers can step."""


# ---- their tensors ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Table:
    """A tensor that the servers keep.

    Attributes:
        index: in the order of the optimizer's groups.
        group: index of its parameter group.
        block: its first block among those of all tensors. The block also numbers the tensor: a tensor of a
            device goes to the servers in several parts, numbered by their first blocks.
        unit: its first unit among those of all tensors.
        step: updates taken.
        has_state: whether the servers have state for it.
        half: where weights come in bfloat16, if they do.
        norm_sq: NovoGrad's running squared norm of the gradient.
        factors: Adafactor's second moment of the rows and of the columns of a matrix.
    """

    parameter: Tensor
    index: int
    group: int
    block: int
    unit: int
    step: int = 0
    has_state: bool = False
    half: Tensor | None = None
    norm_sq: float = 0.0
    factors: tuple[Tensor, Tensor] | None = None

    @property
    def columns(self) -> int:
        """Columns of a matrix whose second moment is factored; else 0."""
        return self.parameter.shape[1] if self.factors else 0

    @property
    def num_units(self) -> int:
        return -(-self.parameter.numel() // int(native.core().SERVED_UNIT))


def tables_of(optimizer: Optimizer) -> list[Table]:
    """Return the trained parameters of all groups."""
    tables: list[Table] = []
    block = unit = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in (each for each in group["params"] if each.requires_grad):
            table = Table(parameter, len(tables), index, block, unit)
            if isinstance(optimizer, Adafactor) and is_factored(parameter, group["min_factored_size"]):
                rows, columns = parameter.shape
                table.factors = torch.zeros(rows, 1), torch.zeros(1, columns)
            tables.append(table)
            block += -(-parameter.numel() // native.core().SERVED_BLOCK)
            unit += table.num_units
    return tables


@dataclass
class _Numbers:
    """Numbers that a group's servers know: of the next model, and of its first tensor's first block."""

    model: int = 0
    table: int = 0


_numbers: WeakKeyDictionary[Any, _Numbers] = WeakKeyDictionary()
"""By group."""


_FACTORS = ("row_var", "col_var")
"""Of a state, the second moments that workers keep."""
_FROM_DEVICE = ("load", "update", "collect")
_TO_DEVICE = ("load", "dump", "update", "apply")
"""Operations whose contribution, or result, has the device of the weights; of others it is on the host."""


class ServedTensors:
    """The tensors of one model on the servers of a process group.

    All ranks call the same methods in the same order. Where a method returns a work, the memory that it reads
    and writes must not change before the work is done.

    Attributes:
        tables: one for each tensor.
        options: of the last :meth:`configure`.
    """

    def __init__(self, group: Any, optimizer: Optimizer, *, half: bool = False, replicas: int = 1) -> None:
        """Number the tensors.

        Args:
            group: backend ``"shoal"``'s process group in Python.
            optimizer: over the tensors; its kind stays.
            half: whether weights come in bfloat16.
            replicas: with 2, workers have a copy of the helper hosts' tensors, and use it if one is lost.
        """
        self._group, self._copied = group, replicas == 2
        self._kernel = kernel_of(optimizer)
        self.tables = tables_of(optimizer)
        for table in self.tables:
            table.half = torch.empty_like(table.parameter, dtype=torch.bfloat16) if half else None
        numbers = _numbers.setdefault(group, _Numbers())
        self._number, self._first = numbers.model, numbers.table
        numbers.model, numbers.table = numbers.model + 1, numbers.table + _num_blocks(self.tables)
        self._device = self.tables[0].parameter.device
        units = sum(table.num_units for table in self.tables)
        self._sums = torch.zeros(units, native.core().SERVED_SUMS, dtype=torch.float64)
        self._rule = 0
        self._was_loaded = False
        self.options: list[tuple[float, ...]] = []

    def configure(self, optimizer: Optimizer, more: str = "") -> None:
        """Send the options of the next step to all servers.

        Raises:
            UsageError: servers cannot update here, such as where all ranks share a host.
            CommError: ranks differ in the options, or in ``more``.
        """
        self._rule += 1
        self.options = options_of(optimizer)
        optimizer_number = native.core().SERVED_OPTIMIZERS[self._kernel.name]
        packed = struct.pack("<4I", self._rule, optimizer_number, len(self.options), 0)
        packed += b"".join(struct.pack("<6d", *options) for options in self.options)
        memory = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        text = describe(optimizer, len(self.tables)) + (", replicas=2" if self._copied else "") + more
        served = self._number, 0, self._rule, 0
        try:
            self._submit(memory, memory, kind="configure", dtype="uint8", op="bor", served=served, text=text)
        except ValueError as problem:
            raise UsageError(f"weights on servers: {problem}") from None

    @torch.no_grad()
    def load(self, optimizer: Optimizer) -> None:
        """Load rank 0's weights and optimizer state, and wait until the servers have them."""
        works = []
        for table in self.tables:
            state = optimizer.state.get(table.parameter, {})
            table.step = int(state["step"]) if self._kernel.counts and state else 0
            table.norm_sq = float(state["exp_avg_sq"]) if self._kernel.has_norm and state else 0.0
            slots = self._slots_of(table, optimizer)
            table.has_state = any(state.get(name) is not None for name in (*slots, *_FACTORS))
            for factor, name in zip(table.factors or (), _FACTORS, strict=False):
                factor.copy_(state[name]) if state else factor.zero_()
            works.append(self._move("load", table, 0, table.parameter.data))
            for slot, name in enumerate(slots, start=1):
                value = state.get(name)
                if value is not None or self._was_loaded:
                    memory = torch.zeros_like(table.parameter)
                    works.append(
                        self._move("load", table, slot, memory if value is None else memory.copy_(value))
                    )
        for work in works:
            work.wait()
        self._was_loaded = True

    @torch.no_grad()
    def dump(self, optimizer: Optimizer) -> None:
        """Bring the state into ``optimizer.state``, in the form of a run without servers."""
        works = []
        for table in self.tables:
            if not table.has_state:
                continue
            state: dict[str, Any] = {}
            for slot, name in enumerate(self._slots_of(table, optimizer), start=1):
                state[name] = torch.zeros_like(table.parameter)
                works.append(self._move("dump", table, slot, state[name]))
            if self._kernel.counts:
                state["step"] = torch.tensor(float(table.step))
            if self._kernel.has_norm:
                state["exp_avg_sq"] = torch.tensor(table.norm_sq)
            for factor, name in zip(table.factors or (), _FACTORS, strict=False):
                state[name] = factor.to(self._device, copy=True)
            if state:
                optimizer.state[table.parameter] = state
        for work in works:
            work.wait()

    @torch.no_grad()
    def dump_weights(self) -> None:
        """Bring the servers' float32 weights into the parameters."""
        for work in [self._move("dump", table, 0, table.parameter.data) for table in self.tables]:
            work.wait()

    def update(self, table: Table, memory: Tensor) -> Any:
        """Send a gradient, in whose place the weights after the step come, or to ``table.half``."""
        target = memory if table.half is None else table.half
        return self._submit(
            memory, target, kind="update", dtype="float32", root=table.group,
            served=self._served(table, self._rule), weights=_name_of(target), columns=table.columns,
        )  # fmt: skip

    def collect(self, table: Table, memory: Tensor) -> Any:
        """Send a gradient, which the servers sum and keep; :meth:`totals` has its norm when that is done."""
        return self._submit(
            memory, self._sums_of(table), kind="collect", dtype="float32", root=table.group,
            served=self._served(table, 0), columns=table.columns,
        )  # fmt: skip

    def measure(self, table: Table, coefficients: list[float]) -> Any:
        """Multiply the gradient by the first number and measure what the optimizer needs, for totals."""
        return self._phase("measure", table, [coefficients], self._sums_of(table))

    def apply(self, table: Table, coefficients: list[float], memory: Tensor) -> Any:
        """Take the step with these coefficients; the weights come to ``memory``, or to ``table.half``."""
        return self._phase("apply", table, [coefficients], memory if table.half is None else table.half)

    def finish_updates(
        self, optimizer: Optimizer, updates: Sequence[tuple[Table, Tensor]], factor: float
    ) -> list[Any]:
        """Take the step with ``factor`` times the collected gradients; return works for the weights.

        Args:
            optimizer: has the options of the step.
            updates: each tensor and the memory to which its weights come.
            factor: finite.
        """
        self.configure(optimizer)
        decide = self._kernel.decide
        if decide is not None:
            self._measure_all(optimizer, [table for table, _ in updates], factor)
        totals = self.totals()[0]
        works = []
        for table, memory in updates:
            coefficients = [factor]
            if decide is not None:
                group, of_tensor = optimizer.param_groups[table.group], totals[table.index]
                coefficients = decide(optimizer, group, of_tensor, table)
            works.append(self.apply(table, coefficients, memory))
        return works

    def _measure_all(self, optimizer: Optimizer, tables: Sequence[Table], factor: float) -> None:
        """Measure what the optimizer needs of ``factor`` times the collected gradients."""
        groups, prepare = optimizer.param_groups, self._kernel.prepare
        sums = self.totals()[0]
        works, matrices = [], []
        for table in tables:
            if table.factors is not None:
                matrices.append((table, *self._sum_squares(table, factor)))
                continue
            coefficients = [factor]
            if prepare is not None:
                coefficients = prepare(groups[table.group], sums[table.index], table, factor)
            works.append(self.measure(table, coefficients))
        for table, of_parts, work in matrices:
            work.wait()
            works.append(self._normalise(table, groups[table.group]["eps1"], of_parts))
        for work in works:
            work.wait()

    def _sum_squares(self, table: Table, factor: float) -> tuple[Tensor, Any]:
        """Sum the squares of a matrix of gradients over columns and rows; return those of parts, a work."""
        core, columns = native.core(), table.columns
        parts = range(0, table.parameter.numel(), core.FACTOR_PART)
        sums = torch.empty(len(parts), core.factor_numbers(columns))
        coefficients = [[factor, columns, begin % columns] for begin in parts]
        return sums, self._phase("factor", table, coefficients, sums)

    def _normalise(self, table: Table, eps1: float, sums: Tensor) -> Any:
        """Turn a matrix of gradients into its update, whose squares and the weights' are measured."""
        assert table.factors is not None
        factors = torch.empty_like(sums)
        native.core().adafactor_decide(
            sums.data_ptr(), table.parameter.numel(), table.columns, share_of(table.step + 1), eps1,
            *(each.data_ptr() for each in table.factors), factors.data_ptr(),
        )  # fmt: skip
        return self._submit_coefficients("normalise", table, factors, self._sums_of(table))

    def totals(self) -> tuple[list[Totals], float]:
        """Return the sums of squares of each tensor, and the norm of all gradients."""
        counts = [table.parameter.numel() for table in self.tables]
        totals: tuple[list[Totals], float] = native.core().unit_totals(self._sums.data_ptr(), counts)
        return totals

    # ---- operations ---------------------------------------------------------------------------------------

    def _phase(self, kind: str, table: Table, coefficients: list[list[float]], result: Tensor) -> Any:
        """Submit an operation with the coefficients of all pieces, or with those of each."""
        padded = torch.zeros(len(coefficients), native.core().SERVED_COEFFICIENTS)
        padded[:, : len(coefficients[0])] = torch.tensor(coefficients)
        return self._submit_coefficients(kind, table, padded, result)

    def _submit_coefficients(self, kind: str, table: Table, coefficients: Tensor, result: Tensor) -> Any:
        return self._submit(
            coefficients, result, kind=kind, dtype="int32", op="bor", root=table.group,
            count=table.parameter.numel(), served=self._served(table, self._rule), weights=_name_of(result),
            columns=table.columns,
        )  # fmt: skip

    def _move(self, kind: str, table: Table, slot: int, memory: Tensor) -> Any:
        """Load a slot of a tensor from rank 0's memory or dump it; all ranks' memory then holds it."""
        if kind == "load" and self._group.rank() != 0:
            memory.zero_()
        served = (self._first + table.block, table.step, self._number, table.block)
        return self._submit(
            memory,
            memory,
            kind=kind,
            dtype="int32",
            op="bor",
            root=slot,
            served=served,
            columns=table.columns,
        )

    def _served(self, table: Table, rule: int) -> tuple[int, int, int, int]:
        return self._first + table.block, table.step + 1, rule, table.block

    def _submit(self, operand: Tensor, result: Tensor, *, kind: str, **words: Any) -> Any:
        """Submit an operation with a contribution and memory for what comes back.

        A device copies those that are its own; the rest is memory of the host, as all is of CPU tensors.
        """
        operation = Operation(
            kind=kind, input=operand.data_ptr(), output=result.data_ptr(), shape=tuple(operand.shape),
            source=operand if kind in _FROM_DEVICE else None, target=result if kind in _TO_DEVICE else None,
            memory=(operand, result), result=operand, copied=self._copied,
            **{"count": operand.numel(), **words},
        )  # fmt: skip
        return self._group.submit(operation, self._device)

    def _slots_of(self, table: Table, optimizer: Optimizer) -> tuple[str, ...]:
        group = optimizer.param_groups[table.group]
        is_plain = self._kernel.name == "sgd" and not group["momentum"]  # SGD without momentum
        return () if is_plain or table.factors is not None else self._kernel.state

    def _sums_of(self, table: Table) -> Tensor:
        return self._sums[table.unit : table.unit + table.num_units]


def _num_blocks(tables: Sequence[Table]) -> int:
    return sum(-(-table.parameter.numel() // int(native.core().SERVED_BLOCK)) for table in tables)


def checksum(tensors: list[Tensor]) -> int:
    """Return the CRC-32C of the numbers of all tensors, each in the order of its shape."""
    return native.crc32c(b"".join(tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors))


def _name_of(weights: Tensor) -> str:
    return "bfloat16" if weights.dtype == torch.bfloat16 else "float32"
