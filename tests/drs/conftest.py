"""The TAS unit and DRS controller in C simulation, built once for all test processes."""

import pytest
from conftest import shared_folder
from filelock import FileLock
from hls.conftest import csim_tools

from drs.tables import LIMITS, Controller
from drs.unit import DrsUnit, build_controller

__all__ = ["csim_tools"]


@pytest.fixture(scope="session")
def _built() -> dict[str, Controller]:
    return {}


@pytest.fixture
def controller(csim_tools: None, _built: dict[str, Controller], tmp_path_factory: pytest.TempPathFactory) -> Controller:
    """A controller with the limits of LIMITS; how many rows it has is up to the table."""
    if not _built:
        libraries = shared_folder(tmp_path_factory) / "csim_libraries"
        libraries.mkdir(exist_ok=True)
        with FileLock(libraries / "drs.lock"):
            _built["drs"] = Controller(DrsUnit(build_controller(LIMITS, libraries)))
    return _built["drs"]
