"""SystemVerilog of linears and MLPs, and the template of a design's sizes."""
