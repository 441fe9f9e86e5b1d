"""What a compiled program launches, counted from the text of its optimized HLO. Pure functions of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
# instructions that launch nothing of their own
_SILENT = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency", "domain"),
    *("partition-id", "replica-id", "optimization-barrier", "while", "conditional", "call"),
}
_ITEM_BITS = {"pred": 8, "bf16": 16, "token": 0}
_SHAPE = re.compile(r"(pred|token|bf16|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_LAYER = re.compile(r"layers(?:_|\[|\.)+(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """``shape``: HLO's text of the result's. ``layer``: of a parameter, the layer it belongs to."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    layer: int | None = None

    @property
    def is_kernel(self) -> bool:
        """Launches work on the device (a kernel, a copy, a library call), but for collectives."""
        return self.opcode not in _SILENT and not self.is_collective and not self.opcode.endswith("-done")

    @property
    def is_collective(self) -> bool:
        """Asynchronous ones count at their start; jax 0.12 writes them as one instruction, 0.10 as two."""
        return self.opcode.removesuffix("-start") in COLLECTIVES


@dataclass(frozen=True, slots=True)
class Collective:
    """``bytes``: what one device sends or receives at least: of an all-reduce its operand, of others their result."""

    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Launches:
    """``loops``: those that the host drives, each turn a round trip (their kernels are not counted)."""

    kernels: int
    collectives: tuple[Collective, ...]
    loops: int

    @property
    def collective_bytes(self) -> int:
        return sum(c.bytes for c in self.collectives)


def launches(instructions: list[Instruction]) -> Launches:
    return Launches(
        kernels=sum(i.is_kernel for i in instructions),
        collectives=tuple(_collective(i) for i in instructions if i.is_collective),
        loops=sum(i.opcode in ("while", "conditional") for i in instructions),
    )


def layer_launches(instructions: list[Instruction]) -> dict[int, Launches]:
    """Of each layer but the first and the last, whose neighbours are the embedding and the head.

    A layer begins with the first launch that reads one of its weights, and ends where the next one begins.
    """
    starts = _layer_starts(instructions)
    inner = sorted(starts)[1:-1]
    return {i: launches(instructions[starts[i] : starts[i + 1]]) for i in inner if i + 1 in starts}


def _layer_starts(instructions: list[Instruction]) -> dict[int, int]:
    """{layer: position}. What only passes weights on (bitcasts, tuples) is looked through."""
    reads: dict[str, set[int]] = {}
    starts: dict[int, int] = {}
    for position, i in enumerate(instructions):
        found = {i.layer} if i.layer is not None else set().union(*(reads.get(o, set()) for o in i.operands))
        if i.opcode in _SILENT:
            reads[i.name] = found
            continue
        for layer in found - starts.keys():
            starts[layer] = position
    return starts


def large_copies(instructions: list[Instruction], at_least: int) -> list[Instruction]:
    """Copies of ``at_least`` bytes: of the pool or of a weight there must be none."""
    return [i for i in instructions if i.opcode in ("copy", "copy-start") and shape_bytes(i.shape) >= at_least]


def entry(text: str) -> list[Instruction]:
    """The instructions of the ENTRY computation, in their order of execution. text: ``compiled.as_text()``."""
    found = []
    for line in _entry_lines(text):
        match = _LINE.match(line)
        if not match:
            continue
        name, rest = match.groups()
        shape, rest = _split_shape(rest)
        opcode, _, rest = rest.partition("(")
        body = _until_closed(rest)
        layer = _LAYER.search(line) if opcode == "parameter" else None
        operands = tuple(re.findall(r"%([\w.-]+)", body))
        found.append(Instruction(name, opcode.strip(), shape, operands, int(layer.group(1)) if layer else None))
    return found


def _entry_lines(text: str) -> Iterator[str]:
    inside = False
    for line in text.splitlines():
        if line.startswith("ENTRY"):
            inside = True
        elif inside and line.startswith("}"):
            return
        elif inside:
            yield line


def _split_shape(text: str) -> tuple[str, str]:
    """ "(f32[2]{0}, s32[]) fusion(...)" -> the shape and the rest."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    inner = _until_closed(text[1:])
    return f"({inner})", text[len(inner) + 2 :]


def _until_closed(text: str) -> str:
    """What stands before the parenthesis that closes one opened before ``text``."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    return text


def shape_bytes(shape: str) -> int:
    """Of all arrays of a shape."""
    return sum(_array_bytes(kind, dims) for kind, dims in _SHAPE.findall(shape))


def _array_bytes(kind: str, dims: str) -> int:
    count = 1
    for dim in filter(None, dims.split(",")):
        count *= int(dim)
    bits = _ITEM_BITS.get(kind) or int(re.match(r"[sufc](\d+)", kind).group(1))  # type: ignore[union-attr]
    return -(-count * bits // 8)


def _collective(i: Instruction) -> Collective:
    kind = i.opcode.removesuffix("-start")
    arrays = [_array_bytes(*found) for found in _SHAPE.findall(i.shape)]
    if i.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # the result of a start is (operands, results, context): the results are what travels
        arrays = [a for a in arrays if a > 4]
        arrays = arrays[len(arrays) // 2 :]
    return Collective(kind, sum(arrays))
