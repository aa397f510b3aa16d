"""Random designs, many of them built into one library: the emitted sources of each, under names of its own."""

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import designs
from fastcar_compile.codegen.hls.design.spec import ACTIVATIONS, WEIGHT_BITS, MlpSpec
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder
from hls.library import best, zcu102
from hls.simulation import Simulation

KINDS = list(product(WEIGHT_BITS, (True, False), ACTIVATIONS))
SIZES = (1, 3, 16, 17, 32, 100, 127, 128, 129, 160, 255, 256, 300)
FLAGS = ["-std=c++14", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-fPIC"]
"""Unoptimised: building takes half the time, and the designs of library.py are built with -O2."""
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]


def random_design(number: int) -> Design:
    """Design `number`: quantisation, kind and activation in turn, everything else drawn."""
    rng = np.random.default_rng(number)
    quant, gated, activation = KINDS[number % len(KINDS)]
    batch = int(rng.choice([1, 2, 3, 4, 5, 8, 11, 16, 31, 32]))
    spec = MlpSpec(
        hidden=int(rng.choice(SIZES)) if rng.random() < 0.7 else int(rng.integers(1, 400)),
        intermediate=int(rng.choice(SIZES)) if rng.random() < 0.7 else int(rng.integers(1, 400)),
        batch=batch,
        layers=1,
        cores=int(rng.integers(1, min(batch, 6) + 1)),
        activation=activation,
        gated=gated,
        quant=quant,
        up_bias=bool(rng.integers(2)),
        down_bias=bool(rng.integers(2)),
    )
    # A large device, so that the number of ports is what was drawn and not what fits.
    budget = zcu102(int(rng.choice([3, 4, 5, 6, 8, 10])), int(rng.choice([128, 128, 256, 512])))
    budget = replace(budget, lut=10**7, ff=10**7, dsp=10**5, bram36=10**5)
    return best(designs(spec, budget))


def register_values(design: Design, rng: np.random.Generator) -> list[int]:
    """One Index Register per class of row pattern: none, all, single rows, as many as cores and one more, every other
    row, and three random ones."""
    rows, cores = design.mlp.batch, design.mlp.cores
    everything = (1 << rows) - 1
    fixed = [0, everything, 1, 1 << (rows - 1), (1 << cores) - 1, (2 << cores) - 1, 0x55555555, 0xAAAAAAAA]
    drawn = [int(rng.integers(0, 1 << rows)) for _ in range(3)]
    return list(dict.fromkeys(value & everything for value in [*fixed, *drawn]))


def build_together(chosen: Sequence[Design], folder: Path) -> list[Simulation]:
    """The C simulation of each design, in one library; undefined behaviour ends the process."""
    lines = ['#include "c0/fastcar_step_processes.hpp"']
    for number, design in enumerate(chosen):
        emit_hls(design, folder / f"c{number}")
        own = ("EngineConfig", "DrsConfig", "StepConfig", "fastcar_step", "fastcar_product")
        own += ("fastcar_multiply", "fastcar_decide")
        names = {name: f"{name}_{number}" for name in own}
        lines += [f"#undef FASTCAR_{guard}_HPP" for guard in ("CONFIG", "DRS_CONFIG", "STEP_CONFIG", "STEP")]
        lines += [f"#define {old} {new}" for old, new in names.items()]
        lines += [f'#include "c{number}/{name}"' for name in ("fastcar_config.hpp", "fastcar_step.cpp")]
        lines += [f"#undef {old}" for old in names]
    source, library = folder / "all.cpp", folder / "all.so"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", *FLAGS, *SANITIZE, "-shared", "-isystem", str(ap_types_folder()), f"-I{folder}"]
    done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    loaded = ctypes.CDLL(str(library))
    return [Simulation(loaded, design, f"_{number}") for number, design in enumerate(chosen)]
