"""Vectors of 16 numbers for functions that are `@compiled`: what Numba's own loops cannot promise.

A loop that the compiler vectorises may add up in another order from one place to the next. These operations have one
order, so a row's bits depend on the row alone. Addresses are plain integers. LLVM turns the vectors into whatever the
machine has; where it has a product of bytes (AVX-512 VNNI), `dot_bytes` is one instruction.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from draftgraph import noise
from draftgraph.compiled import compiled

LANES = 16
HALF = 17  # what float16 is called beside 16, which is bfloat16, and 32
PATIENCE = 20000  # looks at what another thread is going to change, about 0.2 milliseconds
SOON = 1000  # looks: no longer than this is waited for a thread that is at work
BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS, BYTES = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES), ir.VectorType(BYTE, 4 * LANES)
HALVES, BITS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.IntType(1), LANES)
DOUBLES, LONGS = ir.VectorType(ir.DoubleType(), LANES), ir.VectorType(LONG, LANES)
SHORTS, SMALL = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(BYTE, LANES)
PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)  # 32 numbers in bfloat16
DENSE = {32: FLOATS, 16: SHORTS, HALF: HALVES}  # kinds of weights that are no packed ones


class BFloat(ir.Type):  # type: ignore[misc]
    """Numbers in bfloat16 by LLVM's name, which llvmlite does not know: operands of instructions are of it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Vector(types.Type):
    """16 numbers in float32, as a type of compiled functions."""

    def __init__(self) -> None:
        super().__init__("vector")


vector = Vector()
register_model(Vector)(type("VectorModel", (models.PrimitiveModel,), {"__init__": lambda self, manager, kind: (
    models.PrimitiveModel.__init__(self, manager, kind, FLOATS)
)}))  # fmt: skip


class Code:
    """Writes LLVM instructions: what the operations below have in common."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: Any, align: int = 1) -> Any:
        found = self.builder.load(self.pointer(address, kind), typ=kind)
        found.align = align
        return found

    def store(self, address: Any, value: Any, align: int = 1) -> None:
        self.builder.store(value, self.pointer(address, value.type)).align = align

    def call(self, name: str, result: Any, *given: Any) -> Any:
        kind = ir.FunctionType(result, [one.type for one in given])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), given)

    def all(self, number: Any, kind: Any = FLOATS) -> Any:
        """A vector with this number, a constant or a value, in every lane."""
        if isinstance(number, int | float):
            return ir.Constant(kind, [number] * kind.count)
        nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(INT, 0)
        one = self.builder.insert_element(nothing, number, first)
        return self.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count))

    def fma(self, one: Any, other: Any, more: Any) -> Any:
        return self.call("llvm.fma.v16f32", FLOATS, one, other, more)

    def log(self, values: Any) -> Any:
        """Of positive doubles, to the last bit or two: 2 ** whole * part, by the series of atanh for the part."""
        b = self.builder
        bits = b.bitcast(values, LONGS)
        part = b.or_(b.and_(bits, self.all((1 << 52) - 1, LONGS)), self.all(0x3FF << 52, LONGS))  # 1 to 2
        is_large = b.fcmp_ordered(">", b.bitcast(part, DOUBLES), self.all(2**0.5, DOUBLES))
        part = b.bitcast(b.select(is_large, b.sub(part, self.all(1 << 52, LONGS)), part), DOUBLES)
        turns = b.sub(b.lshr(bits, self.all(52, LONGS)), self.all(0x3FF, LONGS))
        turns = b.sitofp(b.add(turns, b.zext(is_large, LONGS)), DOUBLES)
        one = self.all(1.0, DOUBLES)
        ratio = b.fdiv(b.fsub(part, one), b.fadd(part, one))
        square = b.fmul(ratio, ratio)
        found = self.all(2 / 23, DOUBLES)
        for odd in range(21, 1, -2):
            found = self.fma_double(found, square, self.all(2 / odd, DOUBLES))
        small = b.fmul(b.fmul(ratio, square), found)
        small = self.fma_double(turns, self.all(1.908214929270587700e-10, DOUBLES), small)  # ln 2, its low bits
        small = self.fma_double(ratio, self.all(2.0, DOUBLES), small)
        return self.fma_double(turns, self.all(6.93147180369123816490e-1, DOUBLES), small)

    def fma_double(self, one: Any, other: Any, more: Any) -> Any:
        return self.call("llvm.fma.v16f64", DOUBLES, one, other, more)

    def prefetch(self, address: Any) -> None:
        read, kept, data = (ir.Constant(INT, number) for number in (0, 3, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(address, BYTE), read, kept, data)

    def plus(self, address: Any, offset: int) -> Any:
        return self.builder.add(address, ir.Constant(LONG, offset))

    def reduced(self, values: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes by halves: 0 and 8, 1 and 9, ...; then 0 and 4, ..."""
        half = values.type.count // 2
        while half:
            nothing = ir.Constant(values.type, ir.Undefined)
            lower, upper = (
                self.builder.shuffle_vector(
                    values, nothing, ir.Constant(ir.VectorType(INT, half), list(range(start, start + half)))
                )
                for start in (0, half)
            )
            values, half = combine(lower, upper), half // 2
        return self.builder.extract_element(values, ir.Constant(INT, 0))

    def load_where(self, address: Any, kind: Any, mask: Any) -> Any:
        """16 numbers; 0 in lanes that are not in the mask, which are not read."""
        name, align = {FLOATS: ("v16f32", 4), SHORTS: ("v16i16", 2), HALVES: ("v16f16", 2)}[kind]
        nothing = self.all(0 if kind == SHORTS else 0.0, kind)
        given = self.pointer(address, kind), ir.Constant(INT, align), mask, nothing
        return self.call(f"llvm.masked.load.{name}.p0", kind, *given)

    def store_where(self, address: Any, values: Any, mask: Any) -> None:
        """16 numbers in float32, only those in the mask; None: all."""
        if mask is None:
            return self.store(address, values, 4)
        given = values, self.pointer(address, FLOATS), ir.Constant(INT, 4), mask
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), *given)
        return None

    def floats(self, values: Any) -> Any:
        """16 numbers in float32, of numbers in float32, bfloat16 or float16."""
        if values.type == SHORTS:
            return self.builder.bitcast(self.builder.shl(self.builder.zext(values, INTS), self.all(16, INTS)), FLOATS)
        return self.builder.fpext(values, FLOATS) if values.type == HALVES else values

    def cases(self, value: Any, numbers: Iterable[int], write: Callable[[int], None]) -> None:
        """Instructions for each of these numbers, of which those are run that `value` is; for others none."""
        b = self.builder
        numbers = list(numbers)
        blocks, end = [b.append_basic_block() for _ in numbers], b.append_basic_block()
        choice = b.switch(value, end)
        for number, block in zip(numbers, blocks, strict=True):
            choice.add_case(ir.Constant(LONG, number), block)
            b.position_at_end(block)
            write(number)
            b.branch(end)
        b.position_at_end(end)

    def lanes_below(self, count: Any) -> Any:
        """Which lanes are among the first so many."""
        numbers = ir.Constant(INTS, list(range(LANES)))
        return self.builder.icmp_signed("<", numbers, self.all(self.builder.trunc(count, INT), INTS))

    def dot_bytes(self, total: Any, weights: Any, given: Any) -> Any:
        """Adds, lane by lane, four products of an unsigned and a signed byte. # 16 numbers, 64 bytes, 64 bytes"""
        if "avx512vnni" in host_features():
            return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, weights, given)
        wide, b = ir.VectorType(ir.IntType(16), 64), self.builder
        products = b.sext(b.mul(b.zext(weights, wide), b.sext(given, wide)), ir.VectorType(INT, 64))  # they fit 16 bits
        nothing = ir.Constant(products.type, ir.Undefined)
        for start in range(4):
            every = ir.Constant(INTS, list(range(start, 64, 4)))
            total = b.add(total, b.shuffle_vector(products, nothing, every))
        return total

    def dot_pairs(self, total: Any, one: Any, other: Any) -> Any:
        """Adds, lane by lane, two products of numbers in bfloat16. # 16 numbers, 32 in bfloat16, 32 in bfloat16"""
        given = (self.builder.bitcast(numbers, ir.VectorType(BFloat(), 2 * LANES)) for numbers in (one, other))
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *given)


@cache
def host_features() -> frozenset[str]:
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def operation(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operation of compiled functions out of a function that writes its instructions."""

    def decorate(write: Callable[..., Any]) -> Any:
        signature = result(*kinds)

        def codegen(context: Any, builder: Any, _: Any, given: Any) -> Any:
            found = write(Code(builder), *given)
            return context.get_dummy_value() if found is None else found

        names = ", ".join(f"given{number}" for number in range(len(kinds)))
        typing = f"lambda typing, {names}: (signature, codegen)".replace(", :", ":")
        made = eval(typing, {"signature": signature, "codegen": codegen})  # Numba counts the parameters
        made.__name__ = write.__name__
        return intrinsic(made)

    return decorate


number, address, whole = types.float32, types.int64, types.int64


@operation(vector, address)
def load(code: Code, place: Any) -> Any:
    return code.load(place, FLOATS, 4)


@operation(types.void, address, vector)
def store(code: Code, place: Any, values: Any) -> None:
    code.store(place, values, 4)


@operation(vector, address, whole)
def load_first(code: Code, place: Any, count: Any) -> Any:
    """The first lanes; 0 in the others, which are not read."""
    return code.load_where(place, FLOATS, code.lanes_below(count))


@operation(types.void, address, vector, whole)
def store_first(code: Code, place: Any, values: Any, count: Any) -> None:
    code.store_where(place, values, code.lanes_below(count))


@operation(vector, vector, whole, number)
def only_first(code: Code, values: Any, count: Any, others: Any) -> Any:
    """The first lanes; another number in the rest."""
    return code.builder.select(code.lanes_below(count), values, code.all(others))


@operation(number, address)
def load_number(code: Code, place: Any) -> Any:
    return code.load(place, FLOAT, 4)


@operation(types.void, address, number)
def store_number(code: Code, place: Any, value: Any) -> None:
    code.store(place, value, 4)


@operation(whole, address)
def load_whole(code: Code, place: Any) -> Any:
    return code.load(place, LONG, 8)


@operation(types.void, address, whole)
def store_whole(code: Code, place: Any, value: Any) -> None:
    code.store(place, value, 8)


@operation(number, address)
def load_short(code: Code, place: Any) -> Any:
    """A number in bfloat16."""
    b = code.builder
    return b.bitcast(b.shl(b.zext(code.load(place, ir.IntType(16), 2), INT), ir.Constant(INT, 16)), FLOAT)


@operation(vector, address, whole, whole)
def load_kind(code: Code, place: Any, count: Any, kind: Any) -> Any:
    """The first so many of 16 numbers in float32, bfloat16 or float16 (32, 16, HALF), zeros behind them."""
    b, mask = code.builder, code.lanes_below(count)
    found = cgutils.alloca_once_value(b, code.all(0.0))
    code.cases(kind, DENSE, lambda number: b.store(code.floats(code.load_where(place, DENSE[number], mask)), found))
    return b.load(found)


@operation(vector, number)
def everywhere(code: Code, value: Any) -> Any:
    return code.all(value)


@operation(vector, vector, vector, vector)
def fma(code: Code, one: Any, other: Any, more: Any) -> Any:
    """one * other + more, rounded once."""
    return code.fma(one, other, more)


@operation(vector, vector, vector)
def larger(code: Code, one: Any, other: Any) -> Any:
    return code.call("llvm.maxnum.v16f32", FLOATS, one, other)


@operation(vector, vector)
def absolute(code: Code, values: Any) -> Any:
    return code.call("llvm.fabs.v16f32", FLOATS, values)


@operation(types.boolean, address, number)
def any_above(code: Code, place: Any, least: Any) -> Any:
    """Whether one of 16 numbers is larger than this, or no number."""
    b = code.builder
    found = b.fcmp_unordered(">", code.load(place, FLOATS, 4), code.all(least))
    return b.icmp_unsigned("!=", b.bitcast(found, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))


@operation(number, vector)
def total(code: Code, values: Any) -> Any:
    return code.reduced(values, code.builder.fadd)


@operation(number, vector)
def largest(code: Code, values: Any) -> Any:
    def combine(one: Any, other: Any) -> Any:
        return code.call(f"llvm.maxnum.v{one.type.count}f32", one.type, one, other)

    return code.reduced(values, combine)


@operation(types.int32, address, vector)
def store_rounded(code: Code, place: Any, values: Any) -> Any:
    """Stores the nearest whole numbers as bytes; returns their sum."""
    near = code.builder.fptosi(code.call("llvm.rint.v16f32", FLOATS, values), INTS)
    code.store(place, code.builder.trunc(near, SMALL))
    return code.reduced(near, code.builder.add)


@operation(vector, vector)
def exp(code: Code, values: Any) -> Any:
    """To 1 in 10 million. 2 ** whole * e ** rest, the rest by a polynomial (Cephes' coefficients)."""
    b = code.builder
    values = code.call("llvm.maxnum.v16f32", FLOATS, values, code.all(-87.0))
    values = code.call("llvm.minnum.v16f32", FLOATS, values, code.all(88.0))
    turns = code.call("llvm.rint.v16f32", FLOATS, b.fmul(values, code.all(1.44269504088896341)))
    rest = code.fma(turns, code.all(-0.693359375), values)
    rest = code.fma(turns, code.all(2.12194440e-4), rest)
    found = code.all(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        found = code.fma(found, rest, code.all(factor))
    bits = b.shl(b.add(b.fptosi(turns, INTS), code.all(127, INTS)), code.all(23, INTS))
    return b.fmul(found, b.bitcast(bits, FLOATS))


@operation(types.void, whole, address, address)
def store_gumbel(code: Code, key: Any, tokens: Any, place: Any) -> None:
    """16 numbers of `noise.gumbel_rows`: of the row with this key, for tokens int64, as float64."""
    b, keys = code.builder, code.all(key, LONGS)
    one, golden = code.all(1, LONGS), code.all(noise.signed(noise.GOLDEN), LONGS)
    bits = b.add(b.mul(b.add(code.load(tokens, LONGS, 8), one), golden), keys)
    for shift, factor in noise.MIX:
        bits = b.xor(bits, b.lshr(bits, code.all(shift, LONGS)))
        bits = b.mul(bits, code.all(noise.signed(factor), LONGS))
    bits = b.xor(bits, b.lshr(bits, code.all(31, LONGS)))
    counted = b.sitofp(b.lshr(bits, code.all(12, LONGS)), DOUBLES)
    uniform = b.fmul(b.fadd(counted, code.all(0.5, DOUBLES)), code.all(2.0**-52, DOUBLES))
    code.store(place, b.fneg(code.log(b.fneg(code.log(uniform)))), 8)


@operation(whole, address, whole)
def fetch_add(code: Code, place: Any, count: Any) -> Any:
    """Adds to a number that threads share; what it was before."""
    return code.builder.atomic_rmw("add", code.pointer(place, LONG), count, "acq_rel")


@operation(whole, address)
def load_shared(code: Code, place: Any) -> Any:
    return code.builder.load_atomic(code.pointer(place, LONG), "acquire", 8, typ=LONG)


@operation(types.void)
def pause(code: Code) -> None:
    """Between two looks at what another thread is going to change."""
    if "sse2" in host_features():
        code.call("llvm.x86.sse2.pause", ir.VoidType())


@operation(types.void)
def give_way(code: Code) -> None:
    """Lets another thread have the processor, if one wants it."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    code.call(name, INT)


@operation(whole)
def cycles(code: Code) -> Any:
    """Of a clock that all processors share; only differences mean anything."""
    return code.call("llvm.readcyclecounter", LONG)


@compiled
def meet(shared: int, threads: int) -> None:
    """Waits until all threads are here. `shared`: the address of a counter that only this function changes, and of the
    cycles that were waited for long. Who waits for long gives way: other programs may have the processors of others."""
    if threads > 1:
        arrived = fetch_add(shared, 1) + 1
        everyone = (arrived + threads - 1) // threads * threads
        if load_shared(shared) >= everyone:
            return
        looks, start = 0, cycles()
        while load_shared(shared) < everyone:
            looks += 1
            if looks < PATIENCE:
                pause()
            else:
                give_way()
        if looks > SOON:
            fetch_add(shared + 8, cycles() - start)


def between_vectors(operator: Any, write: Callable[..., Any]) -> None:
    compute = operation(vector, vector, vector)(write)

    def for_vectors(one, other):  # type: ignore[no-untyped-def] # Numba compares the parameters, annotations included
        both = isinstance(one, Vector) and isinstance(other, Vector)
        return (lambda one, other: compute(one, other)) if both else None

    overload(operator)(for_vectors)


between_vectors(operator.add, lambda code, one, other: code.builder.fadd(one, other))
between_vectors(operator.sub, lambda code, one, other: code.builder.fsub(one, other))
between_vectors(operator.mul, lambda code, one, other: code.builder.fmul(one, other))
between_vectors(operator.truediv, lambda code, one, other: code.builder.fdiv(one, other))
