"""Jinja templates of the HLS sources."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined

TEMPLATES = "hls_templates"


def render(name: str, **values: object) -> str:
    """Return the text of `hls_templates/<name>.j2` with these values; a name that has none is an error."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)
