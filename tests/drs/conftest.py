"""The DRS controller in C simulation."""

from hls.conftest import build_once, csim_tools

__all__ = ["build_once", "csim_tools"]
