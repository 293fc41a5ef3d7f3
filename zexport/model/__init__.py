"""The Hugging Face model: config, files, Hub names."""
