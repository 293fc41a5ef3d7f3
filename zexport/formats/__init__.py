"""File formats: those of torch.save, read as inert data, and safetensors."""
