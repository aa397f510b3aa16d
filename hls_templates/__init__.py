"""HLS sources: real C++ headers that compile as they stand, and thin Jinja templates for the generated tops.

Found at run time with `importlib.resources.files("hls_templates")`.
"""
