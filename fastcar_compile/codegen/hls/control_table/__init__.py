"""Dynamic Resource Scheduling: the control table and its simulator (docs/reference/drs_table.md)."""
