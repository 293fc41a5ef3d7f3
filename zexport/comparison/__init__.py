"""Two model folders side by side, tensor by tensor."""
