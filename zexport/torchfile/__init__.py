"""Files that ``torch.save`` wrote, read as inert data."""
