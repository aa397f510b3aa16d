"""C++ sources of the host program: real headers and mains, and Jinja templates for what depends on the model."""
