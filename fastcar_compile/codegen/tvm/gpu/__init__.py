"""Target webgpu: the decode step as dispatches of WGSL shaders, which the package `wgpu` runs without TVM."""
