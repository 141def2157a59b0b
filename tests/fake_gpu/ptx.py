"""Executes a kernel's PTX, which NVIDIA's compiler ptxas turns into machine code, on the CPU: all threads of
all blocks at once, as numpy vectors.

It shows what the compiled kernel computes, and that every load and store lies within one of its buffers and
is aligned. It does not show what ptxas and the hardware add: the error of `ex2.approx`, which is rounded
correctly here; fusions that ptxas may make where an instruction allows them (`add.f32`, but not
`add.rn.f32`); races between threads; time.

Only the instructions that our kernels use are known; any other raises NotImplementedError. What they do: PTX
ISA, chapter 9.7 (https://docs.nvidia.com/cuda/parallel-thread-execution).
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tests.fake_gpu.triton_driver import Launch

WARP = 32  # threads
ALIGNMENT = 16  # bytes of the widest access
WINDOW = 2**20  # addresses apart in shared memory, of one block and the next
TYPES: dict[str, type] = {
    "pred": np.bool_,
    "bf16": np.uint16,
    "b16": np.uint16,
    "u16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
}
UNSIGNED: dict[int, type] = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits
SIGNED: dict[int, type] = {32: np.int32, 64: np.int64}
# the only one that operations of float32 give; a CPU's have other bits
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


# Operations


def fused_multiply_add(x: ndarray, y: ndarray, z: ndarray) -> ndarray:
    """x * y + z of float32, rounded once.

    float64 holds the product. The sum is rounded to odd, after which rounding it to float32 gives what one
    rounding would have given (Boldo and Melquiond, 2008); its error is found by Knuth's TwoSum.
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    step_to_odd = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((np.abs(error) > 0) & (bits % 2 == 0), bits + step_to_odd, bits)
    return odd.view(np.float64).astype(np.float32)


def divide_integers(x: ndarray, y: ndarray) -> ndarray:
    """Rounded towards zero."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def from_bfloat16(bits: ndarray) -> ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(value: ndarray) -> ndarray:
    """To nearest, ties to even."""
    bits = value.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16) % 2) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def pack_bfloat16(high: ndarray, low: ndarray) -> ndarray:
    return to_bfloat16(high).astype(np.uint32) << 16 | to_bfloat16(low)


# An opcode without its last part, which is the type of all its operands.
FLOAT_OPERATIONS: dict[str, Callable[..., ndarray]] = {
    "add": np.add,
    "add.rn": np.add,
    "sub": np.subtract,
    "sub.rn": np.subtract,
    "mul": np.multiply,
    "mul.rn": np.multiply,
    "div.rn": np.divide,
    "sqrt.rn": np.sqrt,
    "fma.rn": fused_multiply_add,
    "neg": np.negative,
    "max": np.fmax,  # the other one, where one is no number
    "ex2.approx": lambda x: np.exp2(x.astype(np.float64)).astype(np.float32),
}
INTEGER_OPERATIONS: dict[str, Callable[..., ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mad.lo": lambda x, y, z: x * y + z,
    "div": divide_integers,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "setp.eq": np.equal,
    "setp.ne": np.not_equal,
    "setp.lt": np.less,
    "setp.le": np.less_equal,
}
WIDE_OPERATIONS: dict[str, Callable[..., ndarray]] = {  # of factors that are sign- or zero-extended before
    "mul.wide": np.multiply,
    "mad.wide": lambda x, y, z: x * y + z,
}
CONVERSIONS: dict[str, Callable[..., ndarray]] = {  # besides those from integers to integers
    "cvt.f32.bf16": from_bfloat16,
    "cvt.rn.bf16.f32": to_bfloat16,
    "cvt.rn.bf16x2.f32": pack_bfloat16,
    "cvt.rzi.s64.f32": lambda x: x.astype(np.int64),
}


# Parsing


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: for messages, with the line of the Python file that it comes from
        opcode: with all suffixes
        operands: registers, numbers, names, `[address]` and `{vector}`
        guard: the predicate of the threads that execute it, "" if all do
        negated: whether those execute it whose predicate is false
    """

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str
    negated: bool

    @property
    def operation(self) -> str:
        """The opcode without its last suffix."""
        return self.opcode.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """The last suffix: the type of its operands."""
        return self.opcode.rpartition(".")[2]


@dataclass(frozen=True)
class Code:
    """A kernel.

    Args:
        parameters: their types, by name
        widths: bits of a register, by the beginning of its name
        labels: places among the instructions, by name
    """

    parameters: dict[str, str]
    widths: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(ptx: str) -> Code:
    """The one kernel of a file. Raises NotImplementedError for a line that is neither instruction nor label
    nor directive."""
    head, body = re.split(r"\)\s*\.reqntid \d+\s*\{\n", ptx[ptx.index(".entry") :].split("\n}")[0])
    parameters = {name: kind for kind, name in re.findall(r"\.param \.(\w+) (?:\.ptr .* )?(\w+)", head)}
    widths, instructions, labels, source = dict[str, int](), list[Instruction](), dict[str, int](), ""
    for whole in body.splitlines():
        line, _, comment = (part.strip() for part in whole.partition("//"))
        if line.startswith(".loc"):
            source = comment
        elif found := re.match(r"\.reg \.(\w+)\s+(%\w+)<", line):
            widths[found[2]] = 1 if found[1] == "pred" else int(found[1][1:])
        elif found := re.fullmatch(r"(\$\w+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*([^;]*);", line):
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", found[4])
            instructions.append(
                Instruction(f"{line} ({source})", found[3], tuple(operands), found[2] or "", found[1] == "!")
            )
        elif line and not line.startswith("."):
            raise NotImplementedError(line)
    return Code(parameters, widths, tuple(instructions), labels)


@cache
def parse_number(text: str, dtype: type) -> ndarray:
    """An immediate operand: 12, -1, 0x7f, or 0f3F800000, the bits of a float32."""
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(dtype)
    bits = 8 * np.dtype(dtype).itemsize
    return (
        np.array(bool(int(text, 0)))
        if dtype is np.bool_
        else np.array(int(text, 0) % 2**bits, UNSIGNED[bits]).view(dtype)
    )


def split_vector(text: str) -> list[str]:
    """The registers of `{a, b}`, or of a single one."""
    return re.findall(r"[^{},\s]+", text)


# Memory


class AccessError(Exception):
    """A load or store outside every buffer, or of an address that its size does not divide."""


class Memory:
    """Copies of buffers by address. They lie one behind the other in one array, which is indexed by all
    threads at once."""

    def __init__(self, buffers: Mapping[int, ndarray]) -> None:
        self._buffers = sorted(buffers.items())
        self._starts = np.array([start for start, _ in self._buffers])
        self._ends = np.array([start + len(content) for start, content in self._buffers])
        assert (self._ends[:-1] <= self._starts[1:]).all(), "buffers overlap"
        places, free = list[int](), 0
        for start, content in self._buffers:
            places.append(free + (start - free) % ALIGNMENT)  # aligned as it was
            free = places[-1] + len(content)
        self._places = np.array(places)
        self._bytes = np.zeros(free + -free % ALIGNMENT, np.uint8)
        for place, (_, content) in zip(places, self._buffers, strict=True):
            self._bytes[place : place + len(content)] = content

    def load(self, addresses: ndarray, dtype: type, count: int) -> list[ndarray]:
        """`count` neighbouring values at each address."""
        values, first = self._find(addresses, dtype, count)
        return [values[first + number] for number in range(count)]

    def store(self, addresses: ndarray, vector: Sequence[ndarray]) -> None:
        values, first = self._find(addresses, vector[0].dtype.type, len(vector))
        for number, new in enumerate(vector):
            values[first + number] = new

    def write_back(self) -> None:
        """Copy everything to the buffers that it was made of."""
        for place, (_, content) in zip(self._places, self._buffers, strict=True):
            content[:] = self._bytes[place : place + len(content)]

    def _find(self, addresses: ndarray, dtype: type, count: int) -> tuple[ndarray, ndarray]:
        """All memory as such values, and the place of each address among them."""
        size = np.dtype(dtype).itemsize
        addresses = addresses.view(np.int64)
        buffer = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (buffer < 0) | (addresses + size * count > self._ends[buffer])
        if outside.any():
            raise AccessError(f"{size * count} bytes at {addresses[outside][0]:#x} are outside every buffer")
        if (odd := addresses[addresses % (size * count) != 0]).size:
            raise AccessError(f"{size * count} bytes at {odd[0]:#x} are misaligned")
        return self._bytes.view(dtype), (addresses - self._starts[buffer] + self._places[buffer]) // size


# Execution


class Grid:
    """All threads of a launch. `threads`, bool[blocks * block], says everywhere which of them take part."""

    def __init__(
        self,
        code: Code,
        blocks: int,
        block: int,
        parameters: Sequence[int],
        memory: Memory,
        shared_bytes: int,
    ) -> None:
        """`block`: threads of each block. `parameters`: the bits of each, 0 for those missing at the end."""
        self._code, self._block, self._memory = code, block, memory
        self._everyone = np.ones(blocks * block, np.bool_)
        thread = np.arange(blocks * block, dtype=np.uint32)
        self._window = (thread // block).astype(np.uint64) * WINDOW + WINDOW
        # Shared memory begins as bits that no kernel computes, in float32 no number: reading it before it is
        # written shows.
        self._shared = Memory(
            {WINDOW * number: np.full(shared_bytes, 0xFF, np.uint8) for number in range(1, blocks + 1)}
        )
        self._registers = {"%tid.x": thread % block, "%ctaid.x": thread // block, "global_smem": thread * 0}
        filled = [*parameters, *[0] * (len(code.parameters) - len(parameters))]
        self._parameters = {
            name: np.array([bits], np.uint64) for name, bits in zip(code.parameters, filled, strict=True)
        }

    def run(self) -> None:
        """Execute the code until every thread has returned. The threads furthest behind go first, so that
        those which took different branches meet again."""
        waiting = {0: self._everyone}  # the threads that are next at each place of the code
        while waiting:
            place = min(waiting)
            for following, threads in self._step(place, waiting.pop(place)):
                if following in waiting:
                    threads = threads | waiting[following]
                    threads = self._everyone if threads.all() else threads
                waiting[following] = threads

    def _step(self, place: int, threads: ndarray) -> Iterator[tuple[int, ndarray]]:
        """Execute the instruction at this place; where the threads are then."""
        instruction, stay = self._code.instructions[place], threads
        if instruction.guard:
            threads = threads & (self._registers[instruction.guard] ^ instruction.negated)
        if instruction.opcode in ("bra", "bra.uni", "ret"):
            stay = stay & ~threads
            if instruction.opcode != "ret" and threads.any():
                yield self._code.labels[instruction.operands[0]], threads
        elif threads.any():
            try:
                self._execute(instruction, threads)
            except Exception as error:
                error.add_note(instruction.text)
                raise
        if stay is threads or stay.any():
            yield place + 1, stay

    def _execute(self, instruction: Instruction, threads: ndarray) -> None:
        methods = {
            "mov": self._move,
            "cvt": self._convert,
            "shl": self._shift,
            "shr": self._shift,
            "selp": self._select,
            "ld": self._load,
            "st": self._store,
            "shfl": self._shuffle,
            "redux": self._sum_warp,
            "bar": self._synchronize,
        }
        methods.get(instruction.opcode.partition(".")[0], self._compute)(instruction, threads)

    # Registers hold bits, as unsigned numbers of their width.

    def _read(self, operand: str, dtype: type) -> ndarray:
        """A register or number as this type; of a wider register the lower bits."""
        if operand not in self._registers:
            return parse_number(operand, dtype)
        bits, size = self._registers[operand], np.dtype(dtype).itemsize
        return (bits if bits.dtype.itemsize == size else bits.astype(UNSIGNED[8 * size])).view(dtype)

    def _write(self, register: str, value: ndarray, threads: ndarray) -> None:
        """Set it for some threads. A wider register is filled as the value's type says, by its sign or by
        zeros."""
        width = self._code.widths[register.rstrip("0123456789")]
        if width > 8 * value.dtype.itemsize:
            value = value.astype((SIGNED if value.dtype.kind == "i" else UNSIGNED)[width])
        bits = np.ascontiguousarray(np.broadcast_to(value, threads.shape)).view(UNSIGNED[width])
        if threads is not self._everyone and register in self._registers:
            bits = np.where(threads, bits, self._registers[register])
        self._registers[register] = bits

    # Instructions

    def _compute(self, instruction: Instruction, threads: ndarray) -> None:
        """Those in the tables of operations."""
        dtype, wide = type_of(instruction), instruction.operation in WIDE_OPERATIONS
        operations = (
            FLOAT_OPERATIONS if dtype is np.float32 else WIDE_OPERATIONS if wide else INTEGER_OPERATIONS
        )
        if (operation := operations.get(instruction.operation)) is None:
            raise NotImplementedError(instruction.text)
        register, *operands = instruction.operands
        values = [self._read(operand, dtype) for operand in operands]
        if wide:
            double = TYPES[f"{instruction.kind[0]}64"]
            values = [
                *(value.astype(double) for value in values[:2]),
                *(self._read(operand, double) for operand in operands[2:]),
            ]
        result = operation(*values)
        if dtype is np.float32:
            result = np.where(np.isnan(result), NAN, result)
        self._write(register, result, threads)

    def _move(self, instruction: Instruction, threads: ndarray) -> None:
        target, source = instruction.operands
        if source.startswith("{"):
            self._pack(target, split_vector(source), type_of(instruction), threads)
        elif target.startswith("{"):
            self._unpack(split_vector(target), source, type_of(instruction), threads)
        else:
            self._write(target, self._read(source, type_of(instruction)), threads)

    def _pack(self, register: str, parts: Sequence[str], dtype: type, threads: ndarray) -> None:
        """Several registers into one, the lowest bits first."""
        part = UNSIGNED[8 * np.dtype(dtype).itemsize // len(parts)]
        values = [np.broadcast_to(self._read(one, part), threads.shape) for one in parts]
        self._write(register, np.stack(values, 1).view(dtype)[:, 0], threads)

    def _unpack(self, parts: Sequence[str], register: str, dtype: type, threads: ndarray) -> None:
        """One register into several."""
        part = UNSIGNED[8 * np.dtype(dtype).itemsize // len(parts)]
        values = self._read(register, dtype).view(part).reshape(-1, len(parts))
        for number, one in enumerate(parts):
            if one != "_":  # a part that is not kept
                self._write(one, values[:, number], threads)

    def _convert(self, instruction: Instruction, threads: ndarray) -> None:
        register, *operands = instruction.operands
        values = [self._read(operand, type_of(instruction)) for operand in operands]
        if (conversion := CONVERSIONS.get(instruction.opcode)) is not None:
            self._write(register, conversion(*values), threads)
        elif found := re.fullmatch(r"cvt\.([us]\d+)\.[us]\d+", instruction.opcode):
            self._write(register, values[0].astype(TYPES[found[1]]), threads)
        else:
            raise NotImplementedError(instruction.text)

    def _shift(self, instruction: Instruction, threads: ndarray) -> None:
        register, operand, by = instruction.operands
        dtype = type_of(instruction)
        distance = self._read(by, np.uint32)
        if (distance >= 8 * np.dtype(dtype).itemsize).any():  # numpy leaves open what comes then
            raise NotImplementedError(instruction.text)
        shift = np.left_shift if instruction.operation == "shl" else np.right_shift
        self._write(register, shift(self._read(operand, dtype), distance.astype(dtype)), threads)

    def _select(self, instruction: Instruction, threads: ndarray) -> None:
        register, one, other, condition = instruction.operands
        dtype = type_of(instruction)
        chosen = np.where(self._read(condition, np.bool_), self._read(one, dtype), self._read(other, dtype))
        self._write(register, chosen, threads)

    def _load(self, instruction: Instruction, threads: ndarray) -> None:
        registers, address = instruction.operands
        if instruction.operation == "ld.param":
            value = self._parameters[address.strip("[] ")]
            bits = value.astype(UNSIGNED[8 * np.dtype(type_of(instruction)).itemsize])
            self._write(registers, bits.view(type_of(instruction)), threads)
            return
        vector, dtype = split_vector(registers), type_of(instruction)
        memory, addresses = self._addresses(instruction, address, len(vector))
        for register, loaded in zip(vector, memory.load(addresses[threads], dtype, len(vector)), strict=True):
            value = np.zeros(len(threads), dtype)
            value[threads] = loaded
            self._write(register, value, threads)

    def _store(self, instruction: Instruction, threads: ndarray) -> None:
        address, registers = instruction.operands
        vector, dtype = split_vector(registers), type_of(instruction)
        memory, addresses = self._addresses(instruction, address, len(vector))
        values = [np.broadcast_to(self._read(register, dtype), threads.shape)[threads] for register in vector]
        memory.store(addresses[threads], values)

    def _addresses(self, instruction: Instruction, operand: str, count: int) -> tuple[Memory, ndarray]:
        """What `[register + number]`, or `[name]`, of a load or store means to each thread."""
        _, space, *vector = instruction.operation.split(".")
        found = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        if (
            found is None
            or space not in ("global", "shared", "shared::cta")
            or vector != ([f"v{count}"] if count > 1 else [])
        ):
            raise NotImplementedError(instruction.text)
        register, offset = found[1], parse_number(found[2] or "0", np.uint64)
        if space == "global":
            return self._memory, self._read(register, np.uint64) + offset
        return self._shared, self._read(register, np.uint32).astype(np.uint64) + offset + self._window

    def _shuffle(self, instruction: Instruction, threads: ndarray) -> None:
        """Give each thread the value of the thread of its warp whose number differs by some bits."""
        if instruction.operation != "shfl.sync.bfly":
            raise NotImplementedError(instruction.text)
        self._require_whole(threads, WARP)
        register, operand, bits, *_ = instruction.operands
        other = np.arange(len(threads)) ^ int(bits)
        self._write(register, self._read(operand, np.uint32)[other], threads)

    def _sum_warp(self, instruction: Instruction, threads: ndarray) -> None:
        if instruction.operation != "redux.sync.add":
            raise NotImplementedError(instruction.text)
        self._require_whole(threads, WARP)
        register, operand, _ = instruction.operands
        sums = self._read(operand, np.uint32).reshape(-1, WARP).sum(1, dtype=np.uint32)
        self._write(register, sums.repeat(WARP), threads)

    def _synchronize(self, instruction: Instruction, threads: ndarray) -> None:
        """A barrier: there is nothing to wait for, as no thread is beyond it."""
        self._require_whole(threads, self._block)

    def _require_whole(self, threads: ndarray, size: int) -> None:
        """Of each warp or block all threads must take part, or none."""
        taking_part = threads.reshape(-1, size)
        if (taking_part.any(1) != taking_part.all(1)).any():
            raise RuntimeError(f"only some of {size} threads that must execute this together do so")


def type_of(instruction: Instruction) -> type:
    if instruction.kind not in TYPES:
        raise NotImplementedError(instruction.text)
    return TYPES[instruction.kind]


def execute(launch: Launch, buffers: Sequence[Tensor] = ()) -> None:
    """Change the tensors as the kernel would on a GPU. `buffers`: those that it finds by addresses in other
    tensors.

    Raises AccessError where it would reach beside them.
    """
    code = parse(launch.ptx.read_text())
    if launch.grid[1:] != (1, 1):
        raise NotImplementedError(f"grid {launch.grid}")
    tensors = [argument for argument in launch.arguments if isinstance(argument, Tensor)]
    memory = Memory({tensor.data_ptr(): bytes_of(tensor) for tensor in [*tensors, *buffers]})
    parameters = [
        bits_of(argument, kind)
        for argument, kind in zip(launch.arguments, code.parameters.values(), strict=False)
    ]
    grid = Grid(code, launch.grid[0], launch.warps * WARP, parameters, memory, launch.shared_bytes)
    with np.errstate(all="ignore"):  # overflow and division by zero are no faults on a GPU
        grid.run()
    memory.write_back()


def bytes_of(tensor: Tensor) -> ndarray:
    """From its first element to its last, and what lies between its rows."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()


def bits_of(argument: Any, kind: str) -> int:
    """A kernel's argument as it is passed."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return struct.unpack("I", struct.pack("f", argument))[0] if kind == "f32" else argument % 2**64
