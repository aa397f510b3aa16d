"""Dynamic Resource Scheduling: the control table and its simulator (docs/drs_table.md)."""
