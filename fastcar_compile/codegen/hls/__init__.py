"""HLS C++ of the accelerator: design choice, weight packing, sources and their C simulation."""
