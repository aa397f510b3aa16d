"""The compile side of the accelerator: the search for a hardware design, and what each unit takes."""
