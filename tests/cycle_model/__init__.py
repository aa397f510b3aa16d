"""The cycle model: one decode step of an emitted design, process by process. The closed form's oracle."""
