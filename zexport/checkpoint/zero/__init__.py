"""DeepSpeed ZeRO checkpoints: rank files, flat groups, model parallelism, universal."""
