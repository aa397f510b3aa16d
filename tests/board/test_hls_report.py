"""`fastcar hls-report`: reports in the tools' public formats, written here, against what an artifact says."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.errors import InputError
from fastcar_compile.report.tool_reports import Expected, ReportCheck, ToolLoop, compared, expected_of, read_reports

CSYNTH = """<?xml version="1.0" encoding="UTF-8"?>
<profile>
  <UserAssignments><TopModelName>fastcar_step</TopModelName><TargetClockPeriod>4.00</TargetClockPeriod></UserAssignments>
  <PerformanceEstimates>
    <SummaryOfTimingAnalysis><EstimatedClockPeriod>{period}</EstimatedClockPeriod></SummaryOfTimingAnalysis>
    <SummaryOfOverallLatency><Worst-caseLatency>undef</Worst-caseLatency></SummaryOfOverallLatency>
  </PerformanceEstimates>
  <AreaEstimates>
    <Resources><BRAM_18K>{bram}</BRAM_18K><DSP>{dsp}</DSP><FF>900</FF><LUT>800</LUT><URAM>0</URAM></Resources>
  </AreaEstimates>
  <ModuleInformation>
    <Module><Name>add_row_8_1_64_s</Name><PerformanceEstimates><SummaryOfLoopLatency>
      <add_words><TripCount><range><min>0</min><max>64</max></range></TripCount><Latency>70</Latency>
        <PipelineII>{interval}</PipelineII><PipelineDepth>{depth}</PipelineDepth></add_words>
    </SummaryOfLoopLatency></PerformanceEstimates></Module>
    <Module><Name>quantize_rows_C_Pipeline_sizes</Name><PerformanceEstimates><SummaryOfLoopLatency>
      <passes><TripCount>2</TripCount>
        <sizes><TripCount>16</TripCount><PipelineII>1</PipelineII><PipelineDepth>undef</PipelineDepth></sizes></passes>
    </SummaryOfLoopLatency></PerformanceEstimates></Module>
  </ModuleInformation>
</profile>
"""
TIMING = """------------------------------------------------------------------------------------------------
| Design Timing Summary
| ---------------------
------------------------------------------------------------------------------------------------

    WNS(ns)      TNS(ns)  TNS Failing Endpoints  TNS Total Endpoints      WHS(ns)      THS(ns)
    -------      -------  ---------------------  -------------------      -------      -------
     {slack}        0.000                      0                95481        0.010        0.000
"""
PLACED = """Utilization Design Information

| Site Type                  |  Used | Fixed | Prohibited | Available | Util% |
| CLB LUTs                   | 90210 |     0 |          0 |    274080 | 32.91 |
| CLB Registers              | 91000 |     0 |          0 |    548160 | 16.60 |
| Block RAM Tile             | 130.5 |     0 |          0 |       912 | 14.31 |
| DSPs                       |   300 |     0 |          0 |      2520 | 11.90 |
"""
XCLBIN = """Clocks
------
   Name:      clk_out1
   Index:     0
   Type:      DATA
   Frequency: {clock} MHz

   Name:      other
   Index:     1
   Type:      KERNEL
   Frequency: 500 MHz
"""
GOOD = {"period": "2.92", "bram": 40, "dsp": 100, "interval": 1, "depth": 10, "slack": " 0.123", "clock": 250}
EXPECTED = Expected(
    kernel="fastcar_step",
    clock_mhz=250.0,
    loops={("add_row", "add_words"): (1, 9), ("quantize_rows", "sizes"): (1, 5), ("add_rows", "add_words"): (4, None)},
    resources={"lut": 1000.0, "ff": 1000.0, "dsp": 100.0, "bram36": 20.0, "uram": 0.0},
)


def write(folder: Path, **changes: object) -> Path:
    """The reports of a kernel that is as the model has it, but for the changes."""
    values = GOOD | changes
    synthesis = folder / "fastcar_step" / "hls" / "syn" / "report"
    synthesis.mkdir(parents=True)
    (synthesis / "csynth.xml").write_text(CSYNTH.format(**values))
    (folder / "impl_1_full_util_routed.rpt").write_text(PLACED)
    (folder / "impl_1_full_util_placed.rpt").write_text(PLACED.replace("90210", "1"))
    (folder / "impl_1_timing_summary_routed.rpt").write_text(TIMING.format(**values))
    (folder / "fastcar.xclbin.info").write_text(XCLBIN.format(**values))
    return folder


def worse(checks: list[ReportCheck]) -> list[str]:
    return [check.what for check in checks if check.worse]


def test_what_the_reports_say_is_read(tmp_path: Path) -> None:
    found = read_reports(write(tmp_path), "fastcar_step")
    assert [path.name for path in found.files] == [
        *("csynth.xml", "impl_1_full_util_routed.rpt", "impl_1_timing_summary_routed.rpt", "fastcar.xclbin.info")
    ]
    assert found.loops == [
        ToolLoop("add_row_8_1_64_s", "add_words", 1, 10),
        ToolLoop("quantize_rows_C_Pipeline_sizes", "sizes", 1, None),
    ]
    assert (found.period_ns, found.slack_ns, found.clock_mhz) == (2.92, 0.123, 250.0)
    assert found.hls == {"bram36": 20.0, "dsp": 100.0, "ff": 900.0, "lut": 800.0, "uram": 0.0}
    assert found.placed == {"lut": 90210.0, "ff": 91000.0, "bram36": 130.5, "dsp": 300.0}
    assert worse(compared(EXPECTED, found, 0.1)) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"interval": 2}, "add_row.add_words: interval"),
        ({"depth": 12}, "add_row.add_words: depth"),
        ({"period": "4.01"}, "period, ns"),
        ({"slack": "-0.045"}, "worst slack, ns"),
        ({"clock": 249}, "clock, MHz"),
        ({"dsp": 111}, "dsp"),
        ({"bram": 45}, "bram36"),
    ],
)
def test_what_is_worse_than_the_model_is_told(tmp_path: Path, changes: dict[str, object], what: str) -> None:
    found = read_reports(write(tmp_path, **changes), "fastcar_step")
    assert worse(compared(EXPECTED, found, 0.1)) == [what]
    lenient = {"add_row.add_words: depth", "dsp", "bram36"}
    assert worse(compared(EXPECTED, found, 0.3)) == ([] if what in lenient else [what])


def test_a_folder_without_reports_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no csynth\.xml of fastcar_step, no report of Vivado"):
        read_reports(tmp_path, "fastcar_step")
    (tmp_path / "csynth.xml").write_text(CSYNTH.format(**GOOD))
    with pytest.raises(InputError, match=r"there is no csynth\.xml of fastcar_none"):
        read_reports(tmp_path, "fastcar_none")
    (tmp_path / "csynth.xml").write_text("<profile>")
    with pytest.raises(InputError, match="the report is no XML: "):
        read_reports(tmp_path, "fastcar_step")


SYNTHESIS = "fastcar_step/hls/syn/report/csynth.xml"


@pytest.mark.parametrize(
    ("changes", "file", "field"),
    [
        ({"interval": "inf"}, SYNTHESIS, "add_words/PipelineII of the report is 'inf'"),
        ({"depth": "nan"}, SYNTHESIS, "add_words/PipelineDepth of the report is 'nan'"),
        ({"dsp": "many"}, SYNTHESIS, "DSP of the report is 'many'"),
        ({"slack": "0.1.2"}, "impl_1_timing_summary_routed.rpt", "WNS(ns) of the report is '0.1.2'"),
        ({"clock": "9" * 400}, "fastcar.xclbin.info", "Frequency of the report is '999"),
    ],
)
def test_a_figure_that_is_none_is_named(tmp_path: Path, changes: dict[str, object], file: str, field: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        read_reports(tmp_path, "fastcar_step")
    assert field in caught.value.what
    assert caught.value.where == str(tmp_path / file)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["hls-report", *map(str, words)])


def test_of_an_artifact(artifact: fc.Artifact, tmp_path: Path) -> None:
    expected = expected_of(artifact)
    assert (expected.kernel, expected.clock_mhz) == ("fastcar_step", 250.0)
    assert expected.loops["mac_tile", "words"][0] == expected.loops["quantize_rows", "sizes"][0] == 1
    assert all(depth is not None for key, (_, depth) in expected.loops.items() if key[0] in ("mac_tile", "scale_tile"))
    many = {name: 10**6 * count for name, count in (("bram", 1), ("dsp", 1))}
    result = run(artifact.path, write(tmp_path / "worse", **many), "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert [check["what"] for check in said["checks"] if check["worse"]] == ["dsp", "bram36"]
    assert len(said["files"]) == 4
    text = run(artifact.path, tmp_path / "worse")
    assert text.exit_code == 1
    assert "2 figures worse" in text.stdout
    good = run(artifact.path, write(tmp_path / "good", dsp=1, bram=1))
    assert (good.exit_code, "0 figures worse" in good.stdout) == (0, True)
