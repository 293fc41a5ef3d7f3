"""torch.save files, pickles and safetensors, without DeepSpeed."""
