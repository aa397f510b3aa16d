"""Write the artifact of the present schema that test_compatibility.py opens: `python tests/compatibility/make.py`.

It is written where a schema version goes up, on x86-64, and stays as it is until the next one.
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

PROMPT, COUNT = [[1, 2, 3]], 30


def main() -> None:
    """Compile a decoder of one layer for the least of x86-64, and decode with it."""
    from decoders import llama

    import fastcar_compile as fc
    from fastcar_compile.artifact.manifest import SCHEMA_VERSION

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(num_hidden_layers=1, initializer_range=1.0, head_dim=8, **sizes)
        options = {"tokens_per_frame": 4, "max_seq_len": 40, "prefill_chunk": 1, "host_cpus": ["sse4"]}
        replay = fc.ReplayConfig(threshold=-0.2)
        artifact = fc.compile(model, "cpu", quant="w8a8", replay=replay, output=Path(folder) / "artifact", **options)
        session = artifact.session("cpu")
        expected = {"prompt": PROMPT, "tokens": session.generate(np.array(PROMPT), COUNT).tolist()}
        expected |= {"replay_ratio": session.stats.replay_ratio, "digest": artifact.digest}
        name = HERE / f"schema_{SCHEMA_VERSION}"
        with tarfile.open(f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(artifact.path, "artifact", filter=_plain)
    name.with_suffix(".json").write_text(json.dumps(expected) + "\n")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without what differs between machines."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


if __name__ == "__main__":
    main()
