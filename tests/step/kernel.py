"""A kernel of whole steps in C simulation, launched as a host does."""

import ctypes
from dataclasses import dataclass, field

import numpy as np

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import REPORT_LAYER_WORDS, kernel_interfaces
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows
from fastcar_compile.codegen.hls.step_program.program import StepOp
from fastcar_compile.runtime.backends.hls_csim import aligned
from step.decoder import HIDDEN, Decoder
from step.values import Array


@dataclass
class Kernel:
    """Loaded kernels and their memory: one buffer per memory argument, of the size that the interface says."""

    library: ctypes.CDLL
    made: Decoder
    step: StepDesign
    memory: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill weights, constants and empty caches."""
        interfaces = kernel_interfaces(self.made.made, self.step, self.made.table)
        self._kernels = [kernel.part for kernel in interfaces]
        for port in (argument for kernel in self._kernels for argument in kernel.arguments):
            if port.kind != "scalar":
                self.memory[port.name] = aligned(np.zeros(port.bytes, np.uint8))
        self.put("constants", self.made.constants)
        for number, section in enumerate(self.made.stream):
            self.put(f"weights_{number}", section)
        empty = self.made.memory()
        self.set_caches(empty.keys, empty.values)

    def put(self, name: str, array: Array) -> None:
        """Copy an array to the beginning of a buffer."""
        data = np.frombuffer(array.tobytes(), np.uint8)
        self.memory[name][: data.size] = data

    def decided(self, layer: int) -> list[bool]:
        """Which rows computed, by the answer of the layer's controller in the report."""
        words = self.memory["step_report"].view(np.uint32)[4 * (1 + REPORT_LAYER_WORDS * layer) :]
        return [bool(words[1] >> b & 1) for b in range(self.step.program.sizes.rows)]

    def launch(self, op: int, size: int = 0) -> tuple[int, int]:
        """Launch once; return the status, and the number of the instruction or row that was refused."""
        values = {name: ctypes.c_uint32(value) for name, value in (("op", op), ("bytes", size), ("entry", 0))}
        values |= {name: ctypes.c_void_p(array.ctypes.data) for name, array in self.memory.items()}
        for kernel in reversed(self._kernels):
            self.library[kernel.name](*(values[argument.name] for argument in kernel.arguments))
        status, number = self.memory["step_report"][:8].view(np.uint32)
        return int(status), int(number)

    def load(self, data: bytes) -> int:
        """Load a control table with its program; return the status."""
        room = self.memory["step_program"].size
        kept = self.memory["step_program"]
        self.memory["step_program"] = aligned(np.zeros(max(room, len(data) + 16), np.uint8))
        self.put("step_program", np.frombuffer(data, np.uint8))
        status, _ = self.launch(StepOp.LOAD, len(data))
        self.memory["step_program"] = kept
        return status

    def give(self, x: Array, rows: Rows) -> None:
        """Write the input of a step."""
        words = rows.words()
        self.put("inputs", np.concatenate([words.reshape(-1), x.reshape(-1).view(np.uint32)]))

    def run(self, x: Array, rows: Rows) -> Array:
        """Run one step; return its output, float32 [rows, channels]."""
        self.give(x, rows)
        assert self.launch(StepOp.RUN) == (0, 0)
        head = self.made.made.linears.get("head")
        return self.memory["outputs"].view(np.float32).reshape(len(x), -1)[:, : head.channels if head else HIDDEN]

    def caches(self) -> tuple[Array, Array]:
        """Keys and values, int8 [ports, words, 16]."""
        made, words = self.made.made, self.step.program.sizes.key_words + self.step.program.sizes.value_words
        ports = [self.memory[f"cache_{p}"].view(np.int8) for p in range(made.axi_weight_ports)]
        beats = np.stack(ports).reshape(made.axi_weight_ports, words, made.axi_words, 16)
        sections = beats.transpose(0, 2, 1, 3).reshape(made.ports, words, 16)
        return sections[:, : self.step.program.sizes.key_words], sections[:, self.step.program.sizes.key_words :]

    def set_caches(self, keys: Array, values: Array) -> None:
        """Put the sections of all weight ports into the buffers of the AXI ports."""
        made = self.made.made
        sections = np.concatenate([keys, values], 1).reshape(made.axi_weight_ports, made.axi_words, -1, 16)
        for number, beats in enumerate(sections.transpose(0, 2, 1, 3)):
            self.put(f"cache_{number}", beats)
