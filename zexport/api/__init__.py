"""Public functions, one module per job: export, reshard, verify."""
