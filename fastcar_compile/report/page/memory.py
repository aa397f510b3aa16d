"""The content of the memories: banks of the board, buffers of the kernels, state, parameters."""

import re
from collections.abc import Iterator, Mapping

from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.memory import HOST_RESERVE, bank_map, capacity
from fastcar_compile.errors import size_text
from fastcar_compile.ir.tensor_files import Array, TensorSpec
from fastcar_compile.report.page.models import Json, given

_CONNECTION = re.compile(r"^sp=(\w+)_1\.(\w+):(\S+)$", re.MULTILINE)
"""A line of `link.cfg`: kernel, argument, port or banks."""


def memory_page(
    manifest: Manifest, arrays: Mapping[str, Array], layer_of: Mapping[str, int | None], link: str = ""
) -> Json:
    """Return the memory map: memories and banks, buffers of the kernels, state, parameters.

    Args:
        arrays: every parameter of the rewritten graph. layer_of: parameter -> its layer.
        link: text of the linker's configuration, which connects the arguments of kernels to memory.
    """
    accelerator = manifest.accelerator
    states = [s.model_dump(mode="json", exclude={"sinks"}) | {"bytes": s.nbytes} for s in manifest.decoder.state]
    return {
        "bars": [_whole(manifest), *([] if accelerator is None else _banks(manifest, accelerator))],
        "buffers": [] if accelerator is None else [*_buffers(accelerator, link)],
        "state": states,
        "weights": [_weight(name, array, layer_of.get(name)) for name, array in sorted(arrays.items())],
    }


def _whole(manifest: Manifest) -> Json:
    """Return parameters and state of the decoder, against the memory that it runs from."""
    target, sizes = manifest.target, {"weights": manifest.decoder.weight_bytes} | manifest.decoder.state_bytes()
    pieces = [{"name": name, "bytes": size} for name, size in sizes.items()]
    if target.kind == "cpu":
        return given(name=target.name, note="the machine's own memory", pieces=pieces)
    names = ", ".join(memory.name for memory in target.weight_memories)
    reserve = f"without {size_text(HOST_RESERVE)} for the operating system"
    note = reserve if target.shares_memory else "memory of the card"
    return given(name=f"{target.name}: {names}", note=note, capacity=capacity(target), pieces=pieces)


def _banks(manifest: Manifest, accelerator: AcceleratorSection) -> list[Json]:
    """Return the weight ports: the bank behind each, its part of the weight streams, and of caches."""
    design = Design.of(accelerator.design)
    ports = design.axi_weight_ports
    section = -(-design.weight_bytes // ports)
    banks = bank_map(manifest.target, ports)
    names = [f"weight port {port}" for port in range(ports)]
    if banks is not None:
        names = [f"{name}: {tag}" for name, tag in zip(names, banks.weights, strict=True)]
    room = None if banks is None else banks.bank_bytes
    # The buffers of all ports have one size.
    sizes = [a.bytes for kernel in accelerator.kernels for a in kernel.arguments if a.name in kernel.caches()[:1]]
    pieces = [{"name": "weight stream", "bytes": section}]
    pieces += [{"name": "keys and values", "bytes": size} for size in sizes]
    note = "a bank of its own" if room is not None else "a part of the same memory"
    return [given(name=name, note=note, capacity=room, pieces=pieces) for name in names]


def _buffers(accelerator: AcceleratorSection, link: str) -> Iterator[Json]:
    ports = {(kernel, argument): tag for kernel, argument, tag in _CONNECTION.findall(link)}
    for kernel, a in ((part.name, argument) for part in accelerator.kernels for argument in part.arguments):
        if a.kind != "scalar":
            port = ports.get((kernel, a.name), "")
            yield {"name": a.name, "kernel": kernel, "direction": a.kind, "port": port, "bytes": a.bytes}


def _weight(name: str, array: Array, layer: int | None) -> Json:
    spec = TensorSpec.of(array)
    return given(name=name, dtype=spec.dtype.name, shape=spec.shape, bytes=spec.nbytes, role="weight", layer=layer)
