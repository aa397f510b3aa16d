"""SystemVerilog of the linear path, and the template of a design's sizes."""
