"""What the operating system or a caller may do wrong, and small things that every entry needs."""
