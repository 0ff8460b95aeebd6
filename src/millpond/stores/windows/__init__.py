"""What a slice keeps of a window: stores chosen by how they will be read."""
