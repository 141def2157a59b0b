"""Execute a kernel's PTX, which NVIDIA's compiler ptxas turns into machine code, on the CPU: all threads of
all blocks at the same time, as numpy vectors.

It shows the values that the compiled kernel computes, and that every load and store is aligned and within one
of its buffers. It does not show the effects of ptxas and the hardware: the error of `ex2.approx`, which is
rounded correctly here; fusions that ptxas may make if an instruction allows them (`add.f32`, but not
`add.rn.f32`); races between threads; time.

Only the instructions of the project's kernels are implemented; any other raises NotImplementedError. Source:
PTX ISA, chapter 9.7 (https://docs.nvidia.com/cuda/parallel-thread-execution).
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
WINDOW = 2**20  # distance of the shared-memory addresses of two consecutive blocks
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
# the only NaN that float32 operations return; a CPU's NaNs have other bits
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


# Operations


def fused_multiply_add(x: ndarray, y: ndarray, z: ndarray) -> ndarray:
    """Return x * y + z of float32, rounded once.

    float64 represents the product exactly. The sum is rounded to odd, so that rounding it to float32 equals a
    single rounding (Boldo and Melquiond, 2008); Knuth's TwoSum computes its error.
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    step_to_odd = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((np.abs(error) > 0) & (bits % 2 == 0), bits + step_to_odd, bits)
    return odd.view(np.float64).astype(np.float32)


def flush(x: ndarray) -> ndarray:
    """Return x with 0 in place of subnormal values, with their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def divide_integers(x: ndarray, y: ndarray) -> ndarray:
    """Return the quotient, rounded towards zero."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def from_bfloat16(bits: ndarray) -> ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(value: ndarray) -> ndarray:
    """Round to nearest, ties to even."""
    bits = value.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16) % 2) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def pack_bfloat16(high: ndarray, low: ndarray) -> ndarray:
    return to_bfloat16(high).astype(np.uint32) << 16 | to_bfloat16(low)


# By opcode without its last suffix, which is the type of all operands.
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
    "fma.rn.ftz": lambda x, y, z: flush(fused_multiply_add(flush(x), flush(y), flush(z))),
    "neg": np.negative,
    "setp.eq": np.equal,
    "setp.lt": np.less,
    "max": np.fmax,  # of a NaN and a number, the number
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
    "setp.gt": np.greater,
    "setp.ge": np.greater_equal,
}
WIDE_OPERATIONS: dict[str, Callable[..., ndarray]] = {  # the factors are sign- or zero-extended first
    "mul.wide": np.multiply,
    "mad.wide": lambda x, y, z: x * y + z,
}
CONVERSIONS: dict[str, Callable[..., ndarray]] = {  # except those between integers
    "cvt.f32.bf16": from_bfloat16,
    "cvt.rn.bf16.f32": to_bfloat16,
    "cvt.rn.bf16x2.f32": pack_bfloat16,
    "cvt.rn.f32.s32": lambda x: x.astype(np.float32),
    "cvt.rzi.s64.f32": lambda x: x.astype(np.int64),
}


# Parsing


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: for messages, with its line in the Python file
        opcode: with all suffixes
        operands: registers, numbers, names, `[address]` and `{vector}`
        guard: the predicate of the threads that execute it, "" if all do
        negated: whether threads whose predicate is false execute it
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
        parameters: types by name
        widths: bits of a register, by the prefix of its name
        labels: indices of instructions, by name
    """

    parameters: dict[str, str]
    widths: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(ptx: str) -> Code:
    """Parse the only kernel of a file. Raises NotImplementedError for a line that is no instruction, label or
    directive."""
    head, body = re.split(r"\)\s*\.reqntid \d+\s*\{\n", ptx[ptx.index(".entry") :].split("\n}")[0])
    parameters = {name: kind for kind, name in re.findall(r"\.param \.(\w+) (?:\.ptr .* )?(\w+)", head)}
    widths, instructions, labels, source = dict[str, int](), list[Instruction](), dict[str, int](), ""
    for full_line in body.splitlines():
        line, _, comment = (part.strip() for part in full_line.partition("//"))
        if line.startswith(".loc"):
            source = comment
        elif match := re.match(r"\.reg \.(\w+)\s+(%\w+)<", line):
            widths[match[2]] = 1 if match[1] == "pred" else int(match[1][1:])
        elif match := re.fullmatch(r"(\$\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*([^;]*);", line):
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", match[4])
            instructions.append(
                Instruction(f"{line} ({source})", match[3], tuple(operands), match[2] or "", match[1] == "!")
            )
        elif line and not line.startswith("."):
            raise NotImplementedError(line)
    return Code(parameters, widths, tuple(instructions), labels)


@cache
def parse_number(text: str, dtype: type) -> ndarray:
    """Return the value of an immediate operand: 12, -1, 0x7f, or 0f3F800000, the bits of a float32."""
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(dtype)
    bits = 8 * np.dtype(dtype).itemsize
    return (
        np.array(bool(int(text, 0)))
        if dtype is np.bool_
        else np.array(int(text, 0) % 2**bits, UNSIGNED[bits]).view(dtype)
    )


def split_vector(text: str) -> list[str]:
    """Return the registers of `{a, b}`, or of a single register."""
    return re.findall(r"[^{},\s]+", text)


# Memory


class AccessError(Exception):
    """A load or store outside every buffer, or at a misaligned address."""


class Memory:
    """Copies of buffers by address, consecutive in one array, which all threads index at the same time."""

    def __init__(self, buffers: Mapping[int, ndarray]) -> None:
        self._buffers = sorted(buffers.items())
        self._starts = np.array([start for start, _ in self._buffers])
        self._ends = np.array([start + len(content) for start, content in self._buffers])
        assert (self._ends[:-1] <= self._starts[1:]).all(), "buffers overlap"
        offsets, free = list[int](), 0
        for start, content in self._buffers:
            offsets.append(free + (start - free) % ALIGNMENT)  # with the alignment of the buffer
            free = offsets[-1] + len(content)
        self._offsets = np.array(offsets)
        self._bytes = np.zeros(free + -free % ALIGNMENT, np.uint8)
        for offset, (_, content) in zip(offsets, self._buffers, strict=True):
            self._bytes[offset : offset + len(content)] = content

    def load(self, addresses: ndarray, dtype: type, count: int) -> list[ndarray]:
        """Return `count` consecutive values at each address."""
        values, first = self._find(addresses, dtype, count)
        return [values[first + number] for number in range(count)]

    def store(self, addresses: ndarray, vector: Sequence[ndarray]) -> None:
        """Store consecutive values at each address."""
        values, first = self._find(addresses, vector[0].dtype.type, len(vector))
        for number, new in enumerate(vector):
            values[first + number] = new

    def write_back(self) -> None:
        """Copy the memory to the original buffers."""
        for offset, (_, content) in zip(self._offsets, self._buffers, strict=True):
            content[:] = self._bytes[offset : offset + len(content)]

    def _find(self, addresses: ndarray, dtype: type, count: int) -> tuple[ndarray, ndarray]:
        """Return the entire memory as values of a dtype, and the index of each address in it."""
        size = np.dtype(dtype).itemsize
        addresses = addresses.view(np.int64)
        buffer = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (buffer < 0) | (addresses + size * count > self._ends[buffer])
        if outside.any():
            raise AccessError(f"{size * count} bytes at {addresses[outside][0]:#x} are outside every buffer")
        if (misaligned := addresses[addresses % (size * count) != 0]).size:
            raise AccessError(f"{size * count} bytes at {misaligned[0]:#x} are misaligned")
        return self._bytes.view(dtype), (addresses - self._starts[buffer] + self._offsets[buffer]) // size


# Execution


class Grid:
    """All threads of a launch. In all methods `threads`, bool[blocks * block], is the mask of active
    threads."""

    def __init__(
        self,
        code: Code,
        blocks: int,
        block: int,
        parameters: Sequence[int],
        memory: Memory,
        shared_bytes: int,
    ) -> None:
        """`block`: threads per block. `parameters`: the bits of each; missing parameters at the end are 0."""
        self._code, self._block, self._memory = code, block, memory
        self._all_threads = np.ones(blocks * block, np.bool_)
        thread = np.arange(blocks * block, dtype=np.uint32)
        self._window = (thread // block).astype(np.uint64) * WINDOW + WINDOW
        # Shared memory is initialized with a float32 NaN that no kernel computes, so that reads before writes
        # are detected.
        self._shared = Memory(
            {WINDOW * number: np.full(shared_bytes, 0xFF, np.uint8) for number in range(1, blocks + 1)}
        )
        self._registers = {"%tid.x": thread % block, "%ctaid.x": thread // block, "global_smem": thread * 0}
        padded = [*parameters, *[0] * (len(code.parameters) - len(parameters))]
        self._parameters = {
            name: np.array([bits], np.uint64) for name, bits in zip(code.parameters, padded, strict=True)
        }

    def run(self) -> None:
        """Execute the code until every thread has returned. The threads at the lowest index run first, so
        that threads of different branches converge again."""
        waiting = {0: self._all_threads}  # threads by the index of their next instruction
        while waiting:
            index = min(waiting)
            for successor, threads in self._step(index, waiting.pop(index)):
                if successor in waiting:
                    threads = threads | waiting[successor]
                    threads = self._all_threads if threads.all() else threads
                waiting[successor] = threads

    def _step(self, index: int, threads: ndarray) -> Iterator[tuple[int, ndarray]]:
        """Execute the instruction at an index; yield the next indices and their threads."""
        instruction, remaining = self._code.instructions[index], threads
        if instruction.guard:
            threads = threads & (self._registers[instruction.guard] ^ instruction.negated)
        if instruction.opcode in ("bra", "bra.uni", "ret"):
            remaining = remaining & ~threads
            if instruction.opcode != "ret" and threads.any():
                yield self._code.labels[instruction.operands[0]], threads
        elif threads.any():
            try:
                self._execute(instruction, threads)
            except Exception as error:
                error.add_note(instruction.text)
                raise
        if remaining is threads or remaining.any():
            yield index + 1, remaining

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
        """Return a register or number as a type; of a wider register the lower bits."""
        if operand not in self._registers:
            return parse_number(operand, dtype)
        bits, size = self._registers[operand], np.dtype(dtype).itemsize
        return (bits if bits.dtype.itemsize == size else bits.astype(UNSIGNED[8 * size])).view(dtype)

    def _write(self, register: str, value: ndarray, threads: ndarray) -> None:
        """Set a register for some threads. The value is sign- or zero-extended to a wider register according
        to its type."""
        width = self._code.widths[register.rstrip("0123456789")]
        if width > 8 * value.dtype.itemsize:
            value = value.astype((SIGNED if value.dtype.kind == "i" else UNSIGNED)[width])
        bits = np.ascontiguousarray(np.broadcast_to(value, threads.shape)).view(UNSIGNED[width])
        if threads is not self._all_threads and register in self._registers:
            bits = np.where(threads, bits, self._registers[register])
        self._registers[register] = bits

    # Instructions

    def _compute(self, instruction: Instruction, threads: ndarray) -> None:
        """Execute an instruction from the tables of operations."""
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
        if result.dtype == np.float32:
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
        """Pack several registers into one, the lowest bits first."""
        part = UNSIGNED[8 * np.dtype(dtype).itemsize // len(parts)]
        values = [np.broadcast_to(self._read(name, part), threads.shape) for name in parts]
        self._write(register, np.stack(values, 1).view(dtype)[:, 0], threads)

    def _unpack(self, parts: Sequence[str], register: str, dtype: type, threads: ndarray) -> None:
        """Unpack one register into several."""
        part = UNSIGNED[8 * np.dtype(dtype).itemsize // len(parts)]
        values = self._read(register, dtype).view(part).reshape(-1, len(parts))
        for number, name in enumerate(parts):
            if name != "_":  # an unused part
                self._write(name, values[:, number], threads)

    def _convert(self, instruction: Instruction, threads: ndarray) -> None:
        register, *operands = instruction.operands
        values = [self._read(operand, type_of(instruction)) for operand in operands]
        if (conversion := CONVERSIONS.get(instruction.opcode)) is not None:
            self._write(register, conversion(*values), threads)
        elif match := re.fullmatch(r"cvt\.([us]\d+)\.[us]\d+", instruction.opcode):
            self._write(register, values[0].astype(TYPES[match[1]]), threads)
        else:
            raise NotImplementedError(instruction.text)

    def _shift(self, instruction: Instruction, threads: ndarray) -> None:
        register, operand, by = instruction.operands
        dtype = type_of(instruction)
        distance = self._read(by, np.uint32)
        if (distance >= 8 * np.dtype(dtype).itemsize).any():  # undefined in numpy
            raise NotImplementedError(instruction.text)
        shift = np.left_shift if instruction.operation == "shl" else np.right_shift
        self._write(register, shift(self._read(operand, dtype), distance.astype(dtype)), threads)

    def _select(self, instruction: Instruction, threads: ndarray) -> None:
        register, if_true, if_false, condition = instruction.operands
        dtype = type_of(instruction)
        selected = np.where(
            self._read(condition, np.bool_), self._read(if_true, dtype), self._read(if_false, dtype)
        )
        self._write(register, selected, threads)

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
        """Return the memory and the address of each thread for `[register + number]` or `[name]` of a load or
        store."""
        _, space, *vector = instruction.operation.split(".")
        match = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        if (
            match is None
            or space not in ("global", "shared", "shared::cta")
            or vector != ([f"v{count}"] if count > 1 else [])
        ):
            raise NotImplementedError(instruction.text)
        register, offset = match[1], parse_number(match[2] or "0", np.uint64)
        if space == "global":
            return self._memory, self._read(register, np.uint64) + offset
        return self._shared, self._read(register, np.uint32).astype(np.uint64) + offset + self._window

    def _shuffle(self, instruction: Instruction, threads: ndarray) -> None:
        """Give each thread the value of the thread of its warp whose number differs in the given bits."""
        if instruction.operation != "shfl.sync.bfly":
            raise NotImplementedError(instruction.text)
        self._require_all(threads, WARP)
        register, operand, bits, *_ = instruction.operands
        source = np.arange(len(threads)) ^ int(bits)
        self._write(register, self._read(operand, np.uint32)[source], threads)

    def _sum_warp(self, instruction: Instruction, threads: ndarray) -> None:
        if instruction.operation != "redux.sync.add":
            raise NotImplementedError(instruction.text)
        self._require_all(threads, WARP)
        register, operand, _ = instruction.operands
        sums = self._read(operand, np.uint32).reshape(-1, WARP).sum(1, dtype=np.uint32)
        self._write(register, sums.repeat(WARP), threads)

    def _synchronize(self, instruction: Instruction, threads: ndarray) -> None:
        """Execute a barrier. No wait is necessary, because no thread is past it."""
        self._require_all(threads, self._block)

    def _require_all(self, threads: ndarray, size: int) -> None:
        """Raise RuntimeError unless all threads or no thread of each warp or block are active."""
        active = threads.reshape(-1, size)
        if (active.any(1) != active.all(1)).any():
            raise RuntimeError(
                f"only some of {size} threads that must execute this instruction together do so"
            )


def type_of(instruction: Instruction) -> type:
    if instruction.kind not in TYPES:
        raise NotImplementedError(instruction.text)
    return TYPES[instruction.kind]


def execute(launch: Launch, buffers: Sequence[Tensor] = ()) -> None:
    """Execute a launch: change the tensors as the kernel would on a GPU. `buffers`: tensors whose addresses
    are in other tensors.

    Raises AccessError for an access outside the tensors.
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
    with np.errstate(all="ignore"):  # overflow and division by zero raise no error on a GPU
        grid.run()
    memory.write_back()


def bytes_of(tensor: Tensor) -> ndarray:
    """Return the bytes from a tensor's first element to its last, including gaps between rows."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()


def bits_of(argument: Any, kind: str) -> int:
    """Return the bits of a kernel's argument."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return struct.unpack("I", struct.pack("f", argument))[0] if kind == "f32" else argument % 2**64
