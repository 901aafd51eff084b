"""What the figures in README come from; each prints one JSON object on its last line."""
