"""Reports of the compiler: the dry run, differences of two artifacts, this machine, and the inspection page."""
